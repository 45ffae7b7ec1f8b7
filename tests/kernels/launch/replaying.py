"""A driver that takes notes of what is launched again, and what these launches are compared with."""

import ctypes
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import torch
from fusednorm.arguments.arrays import Array, Workspace
from fusednorm.launch import prepared_kernels, replay_cache
from fusednorm.launch.memories import PlanTensors
from fusednorm.launch.prepared_kernels import DriverLauncher
from fusednorm.tensors.arrays import TORCH_DTYPES
from torch.utils.weak import WeakIdKeyDictionary

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
        self.compiled = []

    def find(self, launch, device):
        kernel, arguments, options = launch.kernel, launch.arguments, launch.options
        constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])

        def call(x, y, z, stream, *rest):
            assert rest[: len(HEAD)] == HEAD
            (parameters,) = rest[len(HEAD) :] if self.packed else (rest[len(HEAD) :],)
            self.launched.append(Launched(kernel, (x, y, z), stream, parameters))
            if self.runs:
                kernel[x, y, z](*map(pointed, parameters, (*arguments, *constants)))

        self.compiled.append((call, arguments, constants))
        compiled = compiled_of(len(self.compiled), arguments, constants)
        launcher = DriverLauncher(call, HEAD, self.packed)
        return prepared_kernels.PreparedKernel(launcher, constants, lambda device: 70 + device, compiled)

    def launch(self, function, grid, threads, shared, early, cooperative, values):
        """A launch of the host extension, as the driver would take it, noted as one of Python's is."""
        assert (threads, shared, early, cooperative) == (128, 4096, True, False)
        call, arguments, constants = self.compiled[function - 1]
        left = iter(values)
        parameters = (*(parameter_of(left, argument) for argument in arguments), *constants)
        assert not list(left)
        call(*grid, 69, *HEAD, *((parameters,) if self.packed else parameters))

    @property
    def values(self):
        """Every parameter of every launch."""
        return [value for again in self.launched for value in flat(again.parameters)]

    def is_repeated(self, call):
        before = len(self.launched)
        call()
        return len(self.launched) > before


def compiled_of(function, arguments, constants):
    """What Triton would have compiled for arguments, as far as the host extension looks at it."""

    def kind(argument):
        if isinstance(argument, tuple):
            return tuple(map(kind, argument))
        if argument is None:
            return "constexpr"
        if isinstance(argument, Array):
            return "*fp32"
        return "fp32" if isinstance(argument, float) else "i64"

    kinds = (*map(kind, arguments), *("constexpr" for _ in constants))
    metadata = SimpleNamespace(
        num_ctas=1,
        num_warps=4,
        shared=4096,
        launch_pdl=True,
        launch_cooperative_grid=False,
        global_scratch_size=0,
        profile_scratch_size=0,
    )
    signature = {str(place): kind for place, kind in enumerate(kinds)}
    return SimpleNamespace(function=function, metadata=metadata, src=SimpleNamespace(signature=signature))


def parameter_of(values, example):
    """The next of the values that a driver is given, as Python would have passed it in that argument's place."""
    if isinstance(example, tuple):
        return tuple(parameter_of(values, item) for item in example)
    if example is None:
        return None
    value = next(values)
    if isinstance(example, float):
        assert value == struct.unpack("<I", struct.pack("<f", example))[0]
        return example
    return value if value < 2**63 else value - 2**64


def pointed(value, example):
    """A parameter as the interpreter takes it: a tensor at that address where the example is an array."""
    if isinstance(example, tuple):
        return tuple(map(pointed, value, example))
    if not isinstance(example, Array):
        return value
    memory = (ctypes.c_char * example.element_size()).from_address(value)
    return torch.frombuffer(memory, dtype=TORCH_DTYPES[example.dtype])


def flat(values):
    for value in values:
        yield from flat(value) if isinstance(value, tuple) else (value,)


def drive(monkeypatch):
    """Have calls repeated by a `Replaying`, where they are."""
    driver = Replaying()
    monkeypatch.setattr(prepared_kernels, "find_prepared", driver.find)
    # The index of a CPU tensor's device.
    monkeypatch.setattr(replay_cache, "current_device", lambda: -1)
    return driver


def note_plans(monkeypatch, *passes):
    """The plans of the calls of modules that go the long way, as they come, with tensors; none is launched."""
    made = []

    def note(device, launches, tensors):
        memories = PlanTensors(device, tensors)
        made.append([replace(launch, arguments=memories.bind(launch.arguments)) for launch in launches])
        for memory, tensor in memories.items():
            if isinstance(memory, Workspace) and memory.purpose is not None:
                _PURPOSES[tensor] = memory.purpose

    for module in passes:
        monkeypatch.setattr(module, "run_launches", note)
    return made


_PURPOSES = WeakIdKeyDictionary()


def purpose_of(tensor):
    """The purpose of a workspace of a plan; None for a tensor that is not a workspace."""
    return _PURPOSES.get(tensor)


def note_workspaces(
    monkeypatch, asked="fusednorm.launch.launch_template.get_or_allocate_stream_workspace", stream=69
):
    """The workspaces that are asked for again, with their purposes."""
    given = []

    def workspace_of(device, of, words, purpose):
        assert (device.type, of) == ("cpu", stream)
        given.append((torch.zeros(words, dtype=torch.int64), purpose))
        return given[-1][0]

    monkeypatch.setattr(asked, workspace_of)
    return given


def addresses(*tensors):
    return [tensor.data_ptr() for tensor in flat(tensors) if tensor is not None]


def compare(launched, plan, of_call, workspaces):
    """What was launched against a plan of the same call, whose own memory and workspaces are other ones.

    Args:
        of_call: addresses of the call's tensors and results.
        workspaces: those that were asked for again, with their purposes.
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
