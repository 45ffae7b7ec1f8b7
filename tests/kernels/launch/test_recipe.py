"""Launches made again over other tensors, with kernels and a driver that only take notes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fusednorm.launch import prepared, workspace
from fusednorm.launch.driver import Launcher
from fusednorm.launch.launch import ByRows, Launch
from fusednorm.launch.recipe import Recipe

KERNEL = SimpleNamespace(name="kernel")
CONSTANTS = (128, True)


@pytest.fixture
def launched(monkeypatch):
    """What the driver is given."""
    calls = []
    launcher = Launcher(lambda *everything: calls.append(everything), ("head",), packed=True)
    kernel = prepared.Prepared(launcher, CONSTANTS, lambda device: 70 + device, None)
    monkeypatch.setattr(prepared, "find", lambda *_: kernel)
    return calls


def recipe_of(*tensors, arguments=None):
    arguments = tensors if arguments is None else arguments
    return Recipe.of([Launch(KERNEL, (3,), tuple(arguments), {})], tensors)


def aligned(*size):
    return torch.zeros(size)


def test_arguments_follow_from_the_tensors_and_the_workspace(launched):
    x, y, (first, second), alone = aligned(8), aligned(8), aligned(2, 5), aligned(3)
    arguments = (x, None, second, (y, None, first), 1, True, 1.0, alone, (y, None, first))
    recipe = recipe_of(x, y, arguments=arguments)
    assert recipe.words == 2 * 64
    assert recipe.launch([160, 320])
    ((*head, parameters),) = launched
    assert head == [3, 1, 1, 69, "head"]
    start = parameters[7] - 256
    assert start % 16 == 0
    pair = (320, None, start)
    assert parameters == (160, None, start + 20, pair, 1, True, 1.0, start + 256, pair, *CONSTANTS)
    assert [type(value) for value in parameters[4:7]] == [int, bool, float]


def test_launches_come_in_order(launched):
    x = aligned(8)
    recipe = Recipe.of([Launch(KERNEL, grid, (x,), {}) for grid in ((3,), (4, 5), (6, 7, 8))], (x,))
    recipe.launch([16])
    assert [call[:3] for call in launched] == [(3, 1, 1), (4, 5, 1), (6, 7, 8)]


def test_memory_of_any_floating_point_is_the_launches_own(launched):
    x, copy, sums = aligned(8), torch.zeros(9, dtype=torch.bfloat16), aligned(3)
    recipe = recipe_of(x, arguments=(copy, x, sums))
    assert recipe.words == 2 * 64
    assert recipe.launch([160])
    first, _, second = launched[0][-1][:3]
    assert second - first == 256


@pytest.mark.parametrize("at", [[8, 16], [16, 24]])
def test_tensors_that_lie_otherwise_are_not_launched_over(at, launched):
    assert not recipe_of(aligned(8), aligned(8)).launch(at)
    assert launched == []


X = aligned(8)
UNTAUGHT = {
    "a tensor that is two": ((X, X), (X,)),
    "a misaligned tensor": ((X[1:],), (X[1:],)),
    "a view of a tensor": ((X,), (X[4:],)),
    "indices": ((X,), (X, torch.zeros(8, dtype=torch.int32))),
    "a part of an exchange buffer": ((X,), (X, torch.zeros(8, dtype=torch.int64)[:4])),
}


@pytest.mark.parametrize("what", UNTAUGHT)
def test_what_does_not_follow_from_the_tensors_teaches_nothing(what, launched):
    tensors, arguments = UNTAUGHT[what]
    assert recipe_of(*tensors, arguments=arguments) is None


def test_kernels_that_are_not_there_teach_nothing(monkeypatch):
    monkeypatch.setattr(prepared, "find", lambda *_: None)
    assert recipe_of(aligned(8)) is None


def test_launches_follow_from_the_number_of_rows_where_all_say_how(launched):
    x = aligned(8)
    rule = ByRows(4, 5, rows=1)
    launches = [
        Launch(KERNEL, (2,), (x, 7), {}, rule),
        Launch(KERNEL, (9, 2), (x, 2, 7), {}, replace(rule, grid=False, rows=None, programs=1)),
        Launch(KERNEL, (7,), (x, 7), {}, ByRows()),
    ]
    recipe = Recipe.of(launches, (x,))
    for rows, programs in ((1, 1), (8, 2), (9, 3), (1000, 5)):
        launched.clear()
        recipe.launch([16], rows)
        assert [(call[:3], call[-1][:-2]) for call in launched] == [
            ((programs, 1, 1), (16, rows)),
            ((9, 2, 1), (16, programs, 7)),
            ((rows, 1, 1), (16, 7)),
        ]
    assert not Recipe.of([*launches, Launch(KERNEL, (7,), (x, 7), {})], (x,)).rules


@pytest.mark.parametrize("purpose", ["exchange_buffer", "counters"])
def test_a_workspace_of_the_stream_is_asked_for_again_by_its_purpose(purpose, launched, monkeypatch):
    x = aligned(8)
    planned = getattr(workspace, purpose)(x.device, 5)
    recipe = recipe_of(x, arguments=(x, planned))
    asked = []

    def workspace_of(*what):
        asked.append(what)
        return planned

    monkeypatch.setattr("fusednorm.launch.recipe.workspace_of", workspace_of)
    recipe.launch([16])
    assert asked == [(x.device, 69, planned.numel(), purpose)]
    assert launched[0][-1][:2] == (16, planned.data_ptr())
