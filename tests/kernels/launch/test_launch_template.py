"""Launches made again over other tensors, with kernels and a driver that only take notes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fusednorm.arguments.arrays import new_workspace, workspace_like
from fusednorm.launch import prepared_kernels, workspaces
from fusednorm.launch.launch_template import LaunchTemplate
from fusednorm.launch.launches import Launch, RowDependence
from fusednorm.launch.prepared_kernels import DriverLauncher
from fusednorm.tensors.arrays import describe_as_array

KERNEL = SimpleNamespace(name="kernel")
CONSTANTS = (128, True)


@pytest.fixture
def launched(monkeypatch):
    """What the driver is given."""
    calls = []
    launcher = DriverLauncher(lambda *everything: calls.append(everything), ("head",), packs_parameters=True)
    kernel = prepared_kernels.PreparedKernel(launcher, CONSTANTS, lambda device: 70 + device, None)
    monkeypatch.setattr(prepared_kernels, "find_prepared", lambda *_: kernel)
    return calls


X, Y = torch.zeros(8), torch.zeros(8)
TENSORS = {"x": X, "y": Y}
ARRAYS = {name: describe_as_array(name, tensor) for name, tensor in TENSORS.items()}


def recipe_of(*arguments, tensors=TENSORS):
    return LaunchTemplate.from_launches([Launch(KERNEL, (3,), arguments, {})], tensors)


def test_arguments_follow_from_the_tensors_and_the_workspace(launched):
    x, y = ARRAYS.values()
    (first, second), alone = new_workspace(x, 2, 5).unbind(), new_workspace(x, 3)
    recipe = recipe_of(x, None, second, (y, None, first), 1, True, 1.0, alone, (y, None, first))
    assert recipe.scratch_words == 2 * 64
    assert recipe.try_launch([160, 320])
    ((*head, parameters),) = launched
    assert head == [3, 1, 1, 69, "head"]
    start = parameters[7] - 256
    assert start % 16 == 0
    pair = (320, None, start)
    assert parameters == (160, None, start + 20, pair, 1, True, 1.0, start + 256, pair, *CONSTANTS)
    assert [type(value) for value in parameters[4:7]] == [int, bool, float]


def test_tensors_are_told_apart_by_name_where_one_is_two(launched):
    assert recipe_of(*ARRAYS.values(), tensors={"x": X, "y": X}).try_launch([160, 320])
    assert launched[0][-1][:2] == (160, 320)


def test_launches_come_in_order(launched):
    launches = [Launch(KERNEL, grid, (ARRAYS["x"],), {}) for grid in ((3,), (4, 5), (6, 7, 8))]
    LaunchTemplate.from_launches(launches, {"x": X}).try_launch([16])
    assert [call[:3] for call in launched] == [(3, 1, 1), (4, 5, 1), (6, 7, 8)]


def test_memory_of_any_floating_point_is_the_launches_own(launched):
    x = ARRAYS["x"]
    recipe = recipe_of(workspace_like(x, "bfloat16"), x, new_workspace(x, 3))
    assert recipe.scratch_words == 2 * 64
    assert recipe.try_launch([160, 320])
    first, _, second = launched[0][-1][:3]
    assert second - first == 256


@pytest.mark.parametrize("at", [[8, 16], [16, 24]])
def test_tensors_that_lie_otherwise_are_not_launched_over(at, launched):
    assert not recipe_of(*ARRAYS.values()).try_launch(at)
    assert launched == []


def test_a_misaligned_tensor_teaches_nothing(launched):
    assert recipe_of(describe_as_array("x", X[1:]), tensors={"x": X[1:]}) is None


def test_kernels_that_are_not_there_teach_nothing(monkeypatch):
    monkeypatch.setattr(prepared_kernels, "find_prepared", lambda *_: None)
    assert recipe_of(ARRAYS["x"]) is None


def test_launches_follow_from_the_number_of_rows_where_all_say_how(launched):
    x = ARRAYS["x"]
    rule = RowDependence(4, 5, rows_index=1)
    launches = [
        Launch(KERNEL, (2,), (x, 7), {}, rule),
        Launch(KERNEL, (9, 2), (x, 2, 7), {}, replace(rule, scales_grid=False, rows_index=None, programs_index=1)),
        Launch(KERNEL, (7,), (x, 7), {}, RowDependence()),
    ]
    recipe = LaunchTemplate.from_launches(launches, {"x": X})
    for rows, programs in ((1, 1), (8, 2), (9, 3), (1000, 5)):
        launched.clear()
        recipe.try_launch([16], rows)
        assert [(call[:3], call[-1][:-2]) for call in launched] == [
            ((programs, 1, 1), (16, rows)),
            ((9, 2, 1), (16, programs, 7)),
            ((rows, 1, 1), (16, 7)),
        ]
    assert not LaunchTemplate.from_launches([*launches, Launch(KERNEL, (7,), (x, 7), {})], {"x": X}).program_rules


@pytest.mark.parametrize("purpose", ["exchange_buffer", "counters"])
def test_a_workspace_of_the_stream_is_asked_for_again_by_its_purpose(purpose, launched, monkeypatch):
    x = ARRAYS["x"]
    planned = getattr(workspaces, f"get_{purpose}")(x.device, 5)
    recipe = recipe_of(x, planned, tensors={"x": X})
    asked, given = [], torch.zeros(4)

    def workspace_of(*what):
        asked.append(what)
        return given

    monkeypatch.setattr("fusednorm.launch.launch_template.get_or_allocate_stream_workspace", workspace_of)
    recipe.try_launch([16])
    assert asked == [(X.device, 69, planned.numel(), purpose)]
    assert launched[0][-1][:2] == (16, given.data_ptr())
