"""What is asked of the server: a seeded pool of requests, and the order in which they are drawn.

The same seed, mix and size give the same requests in the same order, whatever the server.
"""

import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from normserve.client import DType, HostTensor

from normload.elements import narrow

OPERATIONS = (
    "layer_norm",
    "rms_norm",
    "group_norm",
    "layer_norm/backward",
    "rms_norm/backward",
    "group_norm/backward",
)

#: How often each operation is drawn, next to the others, unless told otherwise.
DEFAULT_MIX: Mapping[str, float] = {
    "layer_norm": 3,
    "rms_norm": 3,
    "group_norm": 2,
    "layer_norm/backward": 1,
    "rms_norm/backward": 1,
    "group_norm/backward": 1,
}

# Widths of real models and, at the end, some that no fast path likes.
_COLS = (64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 5120, 8192, 1, 129, 1000, 5000)
_CHANNELS_AND_GROUPS = ((32, 32), (64, 32), (128, 32), (320, 32), (512, 32), (96, 1), (30, 3), (64, 64))
_SIDES = (1, 3, 8, 16, 32, 56, 64)
_ACTIVATIONS = ("none", "silu", "gelu_tanh")
_MIN_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """One request, described; its numbers follow from `seed`.

    Attributes:
        operation: as in the API's path, such as "layer_norm/backward".
        shape, dtype: of x.
        num_groups: of GroupNorm, 0 elsewhere.
        layout: of GroupNorm, "nchw" or "nhwc".
        residual: whether one comes with x.
        affine: whether weight and bias come.
        adaptive: whether scale and shift of each sample come, of GroupNorm.
        seed: of the numbers.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: DType
    activation: str = "none"
    residual: bool = False
    affine: bool = True
    num_groups: int = 0
    layout: str = "nchw"
    seed: int = 0
    adaptive: bool = False

    @property
    def op(self) -> str:
        """The operation without its direction."""
        return self.operation.removesuffix("/backward")

    @property
    def is_backward(self) -> bool:
        """Whether gradients are asked for."""
        return self.operation.endswith("/backward")

    @property
    def channel_axis(self) -> int:
        """Where x has the size that weight and bias have."""
        return 1 if self.op == "group_norm" and self.layout == "nchw" else -1

    def parameters(self) -> dict[str, str | int]:
        """The request's query, as the client's methods take it."""
        parameters: dict[str, str | int] = {"activation": self.activation}
        if self.op == "group_norm":
            parameters |= {"num_groups": self.num_groups, "layout": self.layout}
        return parameters

    def tensors(self) -> dict[str, HostTensor]:
        """The request's tensors by name, made anew at each call and always the same."""
        numbers = np.random.default_rng(self.seed)
        size = (self.shape[self.channel_axis],)
        parameter_dtype = DType.FLOAT32 if self.seed % 2 else self.dtype
        offset, scale = numbers.uniform(-2, 2), numbers.uniform(0.5, 2)
        tensors = {"x": narrow(numbers.normal(offset, scale, self.shape), self.dtype)}
        if self.is_backward:
            tensors["dy"] = narrow(numbers.normal(0, 1, self.shape), self.dtype)
        if self.residual:
            tensors["residual"] = narrow(numbers.normal(0, 1, self.shape), self.dtype)
        if self.affine:
            tensors["weight"] = narrow(numbers.normal(1, 0.3, size), parameter_dtype)
            if self.op != "rms_norm":
                tensors["bias"] = narrow(numbers.normal(0, 0.3, size), parameter_dtype)
        if self.adaptive:
            for name in ("scale", "shift"):
                tensors[name] = narrow(numbers.normal(0, 0.3, (self.shape[0], *size)), parameter_dtype)
        return tensors


class Request:
    """A case with its tensors at hand, so that making them costs nothing while the load runs."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @functools.cached_property
    def tensors(self) -> dict[str, HostTensor]:
        """The case's tensors, made once."""
        return self.case.tensors()

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Workload:
    """A pool of requests, drawn from for ever."""

    def __init__(self, mix: Mapping[str, float], *, max_bytes: int, pool: int, seed: int) -> None:
        """Args:
        mix: operations to how often each is drawn next to the others.
        max_bytes: the largest x; sizes are spread evenly on a logarithmic scale below it.
        pool: how many different requests there are.
        seed: of everything.
        """
        self._choices = random.Random(seed)
        operations = self._choices.choices(list(mix), list(mix.values()), k=pool)
        self.requests: Sequence[Request] = [
            Request(_make_case(operation, max_bytes, self._choices)) for operation in operations
        ]

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        return self._choices.choice(self.requests)


def parse_mix(text: str) -> dict[str, float]:
    """Read `layer_norm=3,group_norm/backward`; an operation without a number is drawn once.

    Raises:
        ValueError: an operation is unknown, or a number is not above 0.
    """
    mix = {}
    for item in text.split(","):
        operation, _, weight = (part.strip() for part in item.partition("="))
        if operation not in OPERATIONS:
            raise ValueError(f"an operation must be one of {', '.join(OPERATIONS)}, got {operation!r}")
        mix[operation] = float(weight or 1)
        if not 0 < mix[operation] < float("inf"):
            raise ValueError(f"{operation} must have a finite weight above 0, got {weight}")
    return mix


def _make_case(operation: str, max_bytes: int, choices: random.Random) -> Case:
    dtype = choices.choice(list(DType))
    low = min(_MIN_BYTES, max_bytes)
    elements = int(low * (max_bytes / low) ** choices.random()) // dtype.itemsize
    activation, residual = choices.choice(_ACTIVATIONS), choices.random() < 0.3
    affine, seed = choices.random() < 0.8, choices.getrandbits(32)
    if not operation.startswith("group_norm"):
        cols = choices.choice([cols for cols in _COLS if cols <= elements] or [1])
        shape: tuple[int, ...] = (max(1, elements // cols), cols)
        return Case(operation, shape, dtype, activation, residual, affine, seed=seed)
    fitting = [pair for pair in _CHANNELS_AND_GROUPS if pair[0] <= elements]
    channels, groups = choices.choice(fitting or [(1, 1)])
    side = choices.choice([side for side in _SIDES if channels * side**2 <= elements] or [1])
    batch = max(1, elements // (channels * side**2))
    layout = choices.choice(("nchw", "nhwc"))
    shape = (batch, channels, side, side) if layout == "nchw" else (batch, side, side, channels)
    adaptive = choices.random() < 0.3
    return Case(operation, shape, dtype, activation, residual, affine, groups, layout, seed, adaptive)
