"""Launches made again over other tensors, with kernels and a driver that only take notes."""

from types import SimpleNamespace

import pytest
import torch
from fusednorm.launch import prepared
from fusednorm.launch.driver import Launcher
from fusednorm.launch.launch import Launch
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


@pytest.mark.parametrize("at", [[8, 16], [16, 0]])
def test_tensors_that_lie_otherwise_or_nowhere_are_not_launched_over(at, launched):
    assert not recipe_of(aligned(8), aligned(8)).launch(at)
    assert launched == []


X = aligned(8)
UNTAUGHT = {
    "a tensor that is two": ((X, X), (X,)),
    "a misaligned tensor": ((X[1:],), (X[1:],)),
    "a view of a tensor": ((X,), (X[4:],)),
    "indices": ((X,), (X, torch.zeros(8, dtype=torch.int32))),
    "a part of a mailbox": ((X,), (X, torch.zeros(8, dtype=torch.int64)[:4])),
}


@pytest.mark.parametrize("what", UNTAUGHT)
def test_what_does_not_follow_from_the_tensors_teaches_nothing(what, launched):
    tensors, arguments = UNTAUGHT[what]
    assert recipe_of(*tensors, arguments=arguments) is None


def test_kernels_that_are_not_there_teach_nothing(monkeypatch):
    monkeypatch.setattr(prepared, "find", lambda *_: None)
    assert recipe_of(aligned(8)) is None
