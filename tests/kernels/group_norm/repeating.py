"""Repeated calls of GroupNorm with a driver that takes notes, and what they are called with."""

import ctypes
from typing import NamedTuple

import fusednorm.api.group_norm as ours
import torch
from fusednorm.launch import prepared
from fusednorm.launch import sample_replay as group_norm_repeat
from fusednorm.launch.driver import Launcher

from tests.kernels.group_norm.cases import channels_last

N, C, GROUPS = 2, 16, 4
SHAPE = (N, C, 8, 8)
PASSES = ("forward", "backward")
HEAD = (11, (4, 1, 0), None)


class Launched(NamedTuple):
    kernel: object
    grid: tuple
    stream: int
    parameters: tuple


class Repeating:
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
        assert value == example
        return value
    memory = (ctypes.c_char * example.element_size()).from_address(value)
    return torch.frombuffer(memory, dtype=example.dtype)


def flat(values):
    for value in values:
        yield from flat(value) if isinstance(value, tuple) else (value,)


def drive(monkeypatch):
    """Have calls repeated by a `Repeating`, where they are."""
    driver = Repeating()
    monkeypatch.setattr(prepared, "find", driver.find)
    # The index of a CPU tensor's device.
    monkeypatch.setattr(group_norm_repeat, "current_device", lambda: -1)
    return driver


def note_plans(monkeypatch):
    """The plans of the calls that go the long way, as they come; none is launched."""
    made = []
    monkeypatch.setattr(ours, "run", lambda device, launches: made.append(launches))
    return made


class Operands:
    """Tensors of one call of both passes; each has memory of its own."""

    def __init__(self, last=False, shape=SHAPE, groups=GROUPS, dtype=torch.float32, **given):
        self.groups = groups
        given = {"residual": False, "scale": False, "affine": True, "saved": True, "outside": False} | given
        lay = channels_last if last else lambda x: x
        x, dy, residual, outside = (lay(torch.randn(shape).to(dtype)) for _ in range(4))
        weight, bias = torch.randn(shape[1]), torch.randn(shape[1]).half()
        scale, shift = torch.randn(shape[0], 2 * shape[1]).to(dtype).chunk(2, dim=1)
        of_samples = {"scale": scale, "shift": shift} if given["scale"] else {}
        self.x, self.dy = x, dy
        self.affine = (weight, bias) if given["affine"] else (None, None)
        self.options = {"residual": residual if given["residual"] else None, **of_samples}
        saved = torch.randn(shape[0], groups), torch.rand(shape[0], groups) + 0.5
        self.gradients = dict(zip(("mean", "rstd"), saved, strict=True)) if given["saved"] else {}
        self.gradients["dresidual_out"] = outside if given["outside"] else None

    def forward(self, **more):
        return ours.group_norm_forward(self.x, self.groups, *self.affine, **self.options, **more)

    def backward(self, **more):
        more.pop("stats", None)
        more.pop("out_dtype", None)
        return ours.group_norm_backward(
            self.dy, self.x, self.groups, *self.affine, **self.options, **self.gradients, **more
        )

    def call(self, pass_, **more):
        return getattr(self, pass_)(**more)


def call(pass_="forward", **changed):
    """A plain call of a pass, with other arguments where they are given."""
    x = changed.pop("x", None)
    x = torch.randn(SHAPE) if x is None else x
    affine = [changed.pop(name, torch.randn(C)) for name in ("weight", "bias")]
    groups = changed.pop("groups", GROUPS)
    if pass_ == "forward":
        return ours.group_norm_forward(x, groups, *affine, **changed)
    dy = changed.pop("dy", None)
    return ours.group_norm_backward(torch.randn_like(x) if dy is None else dy, x, groups, *affine, **changed)
