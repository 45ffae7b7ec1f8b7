"""Cases of GroupNorm: samples at the limits of every table's entries, and a grid of samples without an entry."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import torch
from fusednorm import ActivationName
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.launch import Launch
from fusednorm.ops.group_norm import table as tables
from fusednorm.ops.group_norm.affine import Affine
from fusednorm.ops.group_norm.backward_choice import plan_backward
from fusednorm.ops.group_norm.call import BackwardCall, ForwardCall
from fusednorm.ops.group_norm.forward_choice import plan_forward
from fusednorm.ops.group_norm.sample import Sample
from fusednorm.results import Backward, Forward
from torch import Tensor

from benchmarks.fingerprints.cases import DTYPES, SHORT_NAMES, Case, Tensors, other_dtype

SAMPLES, GROUPS, CHANNELS = 4, 32, 8
"""Sizes of x; channels of a group if a table only has its number of elements."""

EPS = 1e-5

GRID_CHANNELS, GRID_POSITIONS = (1, 3, 10, 64, 160), (1, 49, 1023, 4096, 36864)
"""Sizes of samples whose configuration is computed, not taken from a table."""

BEYOND = 1 << 23
"""Number of elements of a group, too many for all programs of a device to hold together."""

Pass = Literal["forward", "backward"]
Shape = tuple[int, int]
"""Channels of a group, and positions."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The options of a call.

    Attributes:
        residual: "own" with a separate result, "in place", of the "other dtype", or in the "other layout".
        outside: whether dresidual_out is given; by default, if there is a residual.
        other_dtypes: whether the parameters and y have another dtype.
        other_layout: whether dy has another layout than x.
        adaptive: whether scale and shift are given, as halves of one [N, 2 * C].
        samples: number of samples of x.
    """

    name: str
    weight: bool = True
    bias: bool = True
    stats: bool = False
    residual: Literal["", "own", "in place", "other dtype", "other layout"] = ""
    outside: bool | None = None
    activation: ActivationName = "none"
    dropout: float = 0.0
    other_dtypes: bool = False
    other_layout: bool = False
    unaligned: bool = False
    adaptive: bool = False
    samples: int = SAMPLES
    batch_invariant: bool = False


PLAIN = Variant("plain")
FUSED = Variant("fused", stats=True, residual="own", activation="silu", dropout=0.1)
USUAL = (
    PLAIN,
    FUSED,
    Variant("stats", stats=True),
    Variant("residual", residual="own"),
    Variant("silu", activation="silu"),
    Variant("dropout", dropout=0.1),
)
"""Variants for a sample at every limit of a table."""

RARE = (
    Variant("bare", weight=False, bias=False),
    Variant("weight alone", bias=False),
    Variant("bias alone", weight=False),
    Variant("residual in place", residual="in place"),
    Variant("residual other dtype", residual="other dtype"),
    Variant("residual other layout", residual="other layout", stats=True),
    Variant("relu", activation="relu"),
    Variant("gelu", activation="gelu"),
    Variant("gelu_tanh", activation="gelu_tanh"),
    Variant("other dtypes", other_dtypes=True),
    Variant("other layout of dy", other_layout=True),
    Variant("unaligned", unaligned=True),
    Variant("adaptive", adaptive=True, activation="silu"),
    Variant("adaptive alone", weight=False, bias=False, adaptive=True, stats=True),
    Variant("one sample", samples=1),
    Variant("many samples", samples=256),
    Variant("one sample, batch invariant", samples=1, batch_invariant=True),
    Variant("batch invariant", batch_invariant=True),
    Variant("residual alone", residual="own", outside=False),
    Variant("dresidual_out alone", outside=True),
)
"""Variants for one sample of every algorithm."""


def cases() -> Iterator[Case]:
    """All cases, under each policy."""
    for channels_last, dtype in product((False, True), DTYPES):
        yield from _of_pass("forward", dtype, channels_last)
        yield from _of_pass("backward", dtype, channels_last)


def _of_pass(kind: Pass, dtype: torch.dtype, channels_last: bool) -> Iterator[Case]:
    measured = list(_measured(kind, dtype.itemsize, channels_last))
    vector = 16 // dtype.itemsize
    wanted: list[tuple[Shape, Variant, bool]] = []
    algorithms: set[type] = set()
    for (channels, positions), config in measured:
        rare = RARE if type(config) not in algorithms else ()
        algorithms.add(type(config))
        wanted += [((channels, positions), variant, True) for variant in (*USUAL, *rare)]
        wanted += [((channels, positions), variant, False) for variant in (PLAIN, FUSED)]
        wanted += [
            ((channels, fewer), variant, True)
            for fewer in (positions - vector, positions - 1)
            for variant in (PLAIN, FUSED)
        ]
    for shape in product(GRID_CHANNELS, GRID_POSITIONS):
        wanted += [(shape, variant, waits) for variant, waits in product((PLAIN, FUSED), (True, False))]
    for shape in ((4, 49), (4, 256), (10, 36864)):
        wanted += [(shape, variant, waits) for variant, waits in product((*USUAL, *RARE), (True, False))]
    for shape, variant, waits in dict.fromkeys(wanted):
        yield case(kind, dtype, Sample(GROUPS, *shape, channels_last), variant, waits)


def _measured(kind: Pass, itemsize: int, channels_last: bool) -> Iterator[tuple[Shape, object]]:
    """A sample for each entry of the tables, with the entry's number of positions if it has one."""
    if channels_last:
        forward = kind == "forward"
        blocks: tuple[tuple[int, int, object], ...]
        streams: tuple[tuple[int, int, object], ...]
        blocks = tables.FORWARD_CHANNELS_LAST[itemsize] if forward else tables.BACKWARD_CHANNELS_LAST[itemsize]
        streams = tables.FORWARD_STREAM[itemsize] if forward else tables.BACKWARD_STREAM[itemsize]
        yield from (((channels, positions), config) for channels, positions, config in blocks)
        yield from (((columns // GROUPS, positions), config) for columns, positions, config in streams)
    elif kind == "backward":
        entries = tables.BACKWARD_CONTIGUOUS[itemsize]
        yield from (((channels, positions), config) for channels, positions, config in entries)
    else:
        before = 0
        for limit, config in tables.FORWARD_CONTIGUOUS[itemsize]:
            longest = before + before // 4 if limit >= BEYOND else limit
            yield (CHANNELS, longest // CHANNELS), config
            # Groups with unaligned starts, and vectors that span two channels.
            yield (5, longest // 5 - 1 | 1), config
            before = limit
        yield (CHANNELS, BEYOND // CHANNELS), None


def case(kind: Pass, dtype: torch.dtype, sample: Sample, variant: Variant, waits: bool = True) -> Case:
    """A call with samples of `dtype`; `waits`: whether programs may wait for one another."""
    layout = "channels-last" if sample.channels_last else "contiguous"
    policy = "" if waits else ", nothing waits"
    plan = _forward if kind == "forward" else _backward
    return Case(
        f"group_norm {layout} {kind} {SHORT_NAMES[dtype]} "
        f"{variant.samples}x{sample.groups}x{sample.channels}x{sample.hw} {variant.name}{policy}",
        partial(plan, dtype, sample, variant),
        unaligned=variant.unaligned,
        waits=waits,
        batch_invariant=variant.batch_invariant,
    )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Tensors of both forward and backward passes."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    scale: Tensor | None
    shift: Tensor | None

    def affine(self, tensors: Tensors) -> Affine:
        return Affine(*map(tensors.describe, (self.weight, self.bias, self.scale, self.shift)))


def _like_x(
    tensors: Tensors, role: str, sample: Sample, samples: int, dtype: torch.dtype, other_layout: bool = False
) -> Tensor:
    """[N, C, positions] in the sample's layout or in the other one."""
    if sample.channels_last != other_layout:
        return tensors.new(role, (samples, sample.hw, sample.c), dtype).movedim(-1, 1)
    return tensors.new(role, (samples, sample.c, sample.hw), dtype)


def _inputs(tensors: Tensors, dtype: torch.dtype, sample: Sample, variant: Variant) -> _Inputs:
    x = _like_x(tensors, "x", sample, variant.samples, dtype)
    of_parameters = other_dtype(dtype) if variant.other_dtypes else dtype
    weight = tensors.new("weight", (sample.c,), of_parameters) if variant.weight else None
    bias = tensors.new("bias", (sample.c,), of_parameters) if variant.bias else None
    residual = None
    if variant.residual:
        of_residual = other_dtype(dtype) if variant.residual == "other dtype" else dtype
        otherwise = variant.residual == "other layout"
        residual = _like_x(tensors, "residual", sample, variant.samples, of_residual, otherwise)
    scale, shift = None, None
    if variant.adaptive:
        both = tensors.new("scale_shift", (variant.samples, 2 * sample.c), of_parameters)
        scale, shift = both.chunk(2, 1)
    return _Inputs(x, weight, bias, residual, scale, shift)


def _options(sample: Sample, variant: Variant) -> NormOptions:
    seed = 7 if variant.dropout else None
    return NormOptions("group_norm", sample.groups, EPS, 0.0, variant.activation, variant.dropout, seed)


def _statistics(tensors: Tensors, sample: Sample, variant: Variant) -> tuple[Tensor | None, Tensor | None]:
    if not variant.stats:
        return None, None
    shape = (variant.samples, sample.groups)
    return tensors.new("mean", shape, torch.float32), tensors.new("rstd", shape, torch.float32)


def _forward(dtype: torch.dtype, sample: Sample, variant: Variant, tensors: Tensors) -> list[Launch]:
    inputs = _inputs(tensors, dtype, sample, variant)
    mean, rstd = _statistics(tensors, sample, variant)
    residual_out = inputs.residual
    if inputs.residual is not None and variant.residual != "in place":
        residual_out = _like_x(tensors, "residual_out", sample, variant.samples, dtype)
    of_y = other_dtype(dtype) if variant.other_dtypes else dtype
    y = _like_x(tensors, "y", sample, variant.samples, of_y)
    describe = tensors.describe
    call = ForwardCall(
        x=describe(inputs.x),
        sample=sample,
        affine=inputs.affine(tensors),
        options=_options(sample, variant),
        residual=describe(inputs.residual),
        out=Forward(*map(describe, (y, mean, rstd, residual_out))),
    )
    return plan_forward(call)


def _backward(dtype: torch.dtype, sample: Sample, variant: Variant, tensors: Tensors) -> list[Launch]:
    inputs = _inputs(tensors, dtype, sample, variant)
    mean, rstd = _statistics(tensors, sample, variant)
    of_dy = other_dtype(dtype) if variant.other_dtypes else dtype
    dy = _like_x(tensors, "dy", sample, variant.samples, of_dy, variant.other_layout)
    outside = None
    if inputs.residual is not None if variant.outside is None else variant.outside:
        otherwise = variant.residual == "other layout"
        outside = _like_x(tensors, "dresidual_out", sample, variant.samples, dtype, otherwise)
    dx = _like_x(tensors, "dx", sample, variant.samples, dtype)
    dweight, dbias, dscale, dshift = (
        None if parameter is None else tensors.new(role, tuple(parameter.shape), parameter.dtype)
        for role, parameter in (
            ("dweight", inputs.weight), ("dbias", inputs.bias), ("dscale", inputs.scale), ("dshift", inputs.shift)
        )
    )  # fmt: skip
    describe = tensors.describe
    place = describe(dx)
    dresidual = None if inputs.residual is None else place
    call = BackwardCall(
        dy=describe(dy),
        x=describe(inputs.x),
        sample=sample,
        affine=inputs.affine(tensors),
        options=_options(sample, variant),
        mean=describe(mean),
        rstd=describe(rstd),
        residual=describe(inputs.residual),
        dresidual_out=describe(outside),
        out=Backward(
            place, describe(dweight), describe(dbias), dresidual, dscale=describe(dscale), dshift=describe(dshift)
        ),
    )
    return plan_backward(call)
