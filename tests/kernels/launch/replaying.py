"""A driver that takes notes of what is launched again, and what these launches are compared with."""

import ctypes
from typing import NamedTuple

import torch
from fusednorm.launch import prepared, replay
from fusednorm.launch.driver import Launcher

HEAD = (11, (4, 1, 0), None)


class Launched(NamedTuple):
    kernel: object
    grid: tuple
    stream: int
    parameters: tuple


class Replaying:
    """Pretends that every interpreted launch left a compiled kernel; `launched` notes what is launched again."""

    def __init__(self):
        self.launched = []
        self.packed = True
        self.runs = False

    def find(self, kernel, arguments, options, device):
        constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])

        def call(x, y, z, stream, *rest):
            assert rest[: len(HEAD)] == HEAD
            (parameters,) = rest[len(HEAD) :] if self.packed else (rest[len(HEAD) :],)
            self.launched.append(Launched(kernel, (x, y, z), stream, parameters))
            if self.runs:
                kernel[x, y, z](*map(pointed, parameters, (*arguments, *constants)))

        return prepared.Prepared(Launcher(call, HEAD, self.packed), constants, lambda device: 70 + device, None)

    @property
    def values(self):
        """Every parameter of every launch."""
        return [value for again in self.launched for value in flat(again.parameters)]

    def is_repeated(self, call):
        before = len(self.launched)
        call()
        return len(self.launched) > before


def pointed(value, example):
    """A parameter as the interpreter takes it: a tensor at that address where the example is one."""
    if isinstance(example, tuple):
        return tuple(map(pointed, value, example))
    if not isinstance(example, torch.Tensor):
        return value
    memory = (ctypes.c_char * example.element_size()).from_address(value)
    return torch.frombuffer(memory, dtype=example.dtype)


def flat(values):
    for value in values:
        yield from flat(value) if isinstance(value, tuple) else (value,)


def drive(monkeypatch):
    """Have calls repeated by a `Replaying`, where they are."""
    driver = Replaying()
    monkeypatch.setattr(prepared, "find", driver.find)
    # The index of a CPU tensor's device.
    monkeypatch.setattr(replay, "current_device", lambda: -1)
    return driver


def note_plans(monkeypatch, *passes):
    """The plans of the calls of modules that go the long way, as they come; none is launched."""
    made = []
    for module in passes:
        monkeypatch.setattr(module, "run", lambda device, launches: made.append(launches))
    return made


def note_workspaces(monkeypatch):
    """The workspaces that are asked for again, with their purposes."""
    given = []

    def workspace_of(device, stream, words, purpose):
        assert (device.type, stream) == ("cpu", 69)
        given.append((torch.zeros(words, dtype=torch.int64), purpose))
        return given[-1][0]

    monkeypatch.setattr("fusednorm.launch.recipe.workspace_of", workspace_of)
    return given


def addresses(*tensors):
    return [tensor.data_ptr() for tensor in flat(tensors) if tensor is not None]


def compare(launched, plan, of_call, workspaces, purpose_of):
    """What was launched against a plan of the same call, whose own memory and workspaces are other ones.

    Args:
        of_call: addresses of the call's tensors and results.
        workspaces: those that were asked for again, with their purposes.
        purpose_of: that of a workspace in the plan, None of any other tensor.
    """
    assert [again.kernel for again in launched] == [launch.kernel for launch in plan]
    moved = {}
    for again, launch in zip(launched, plan, strict=True):
        assert again.grid == (*launch.grid, 1, 1)[:3]
        assert again.stream == 69
        constants = [launch.options[name] for name in launch.kernel.arg_names[len(launch.arguments) :]]
        wanted = [*flat(launch.arguments), *constants]
        for value, argument in zip(flat(again.parameters), wanted, strict=True):
            if not isinstance(argument, torch.Tensor):
                assert type(value) is type(argument)
                assert value == argument
            elif argument.data_ptr() in of_call:
                assert value == argument.data_ptr()
            elif argument.dtype == torch.int64:
                known = [(box.data_ptr(), box.numel(), purpose) for box, purpose in workspaces]
                assert (value, argument.numel(), purpose_of(argument)) in known
            else:
                storage = argument.untyped_storage()
                start = value - (argument.data_ptr() - storage.data_ptr())
                assert moved.setdefault(storage.data_ptr(), (start, storage.nbytes()))[0] == start
    end = 0
    for start, nbytes in sorted(moved.values()):
        assert start >= end
        assert start % 16 == 0
        end = start + nbytes
