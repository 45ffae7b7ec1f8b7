"""Cases of GroupNorm: samples at the limits of every table's entries, and a grid of samples without an entry."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import torch
from fusednorm import ActivationName
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.launches import Launch
from fusednorm.ops.group_norm import config_tables as tables
from fusednorm.ops.group_norm.affine_step import AffineParameters
from fusednorm.ops.group_norm.backward_choice import plan_backward
from fusednorm.ops.group_norm.call import GroupNormBackwardCall, GroupNormForwardCall
from fusednorm.ops.group_norm.forward_choice import plan_forward
from fusednorm.ops.group_norm.sample_shape import SampleShape
from fusednorm.results import Backward, Forward
from torch import Tensor

from benchmarks.fingerprints.cases import DTYPES, SHORT_NAMES, FingerprintCase, MetaTensors, choose_other_dtype

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
class GroupNormVariant:
    """The options of a call.

    Attributes:
        residual: "own" with a separate result, "in place", of the "other dtype", or in the "other layout".
        has_dresidual_out: whether dresidual_out is given; by default, if there is a residual.
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
    has_dresidual_out: bool | None = None
    activation: ActivationName = "none"
    dropout: float = 0.0
    other_dtypes: bool = False
    other_layout: bool = False
    unaligned: bool = False
    adaptive: bool = False
    samples: int = SAMPLES
    batch_invariant: bool = False


PLAIN = GroupNormVariant("plain")
FUSED = GroupNormVariant("fused", stats=True, residual="own", activation="silu", dropout=0.1)
USUAL = (
    PLAIN,
    FUSED,
    GroupNormVariant("stats", stats=True),
    GroupNormVariant("residual", residual="own"),
    GroupNormVariant("silu", activation="silu"),
    GroupNormVariant("dropout", dropout=0.1),
)
"""Variants for a sample at every limit of a table."""

RARE = (
    GroupNormVariant("bare", weight=False, bias=False),
    GroupNormVariant("weight alone", bias=False),
    GroupNormVariant("bias alone", weight=False),
    GroupNormVariant("residual in place", residual="in place"),
    GroupNormVariant("residual other dtype", residual="other dtype"),
    GroupNormVariant("residual other layout", residual="other layout", stats=True),
    GroupNormVariant("relu", activation="relu"),
    GroupNormVariant("leaky_relu", activation="leaky_relu"),
    GroupNormVariant("gelu", activation="gelu"),
    GroupNormVariant("gelu_tanh", activation="gelu_tanh"),
    GroupNormVariant("other dtypes", other_dtypes=True),
    GroupNormVariant("other layout of dy", other_layout=True),
    GroupNormVariant("unaligned", unaligned=True),
    GroupNormVariant("adaptive", adaptive=True, activation="silu"),
    GroupNormVariant("adaptive alone", weight=False, bias=False, adaptive=True, stats=True),
    GroupNormVariant("one sample", samples=1),
    GroupNormVariant("many samples", samples=256),
    GroupNormVariant("one sample, batch invariant", samples=1, batch_invariant=True),
    GroupNormVariant("batch invariant", batch_invariant=True),
    GroupNormVariant("residual alone", residual="own", has_dresidual_out=False),
    GroupNormVariant("dresidual_out alone", has_dresidual_out=True),
)
"""Variants for one sample of every algorithm."""


def iterate_cases() -> Iterator[FingerprintCase]:
    """All cases, under each policy."""
    for channels_last, dtype in product((False, True), DTYPES):
        yield from _iterate_pass_cases("forward", dtype, channels_last)
        yield from _iterate_pass_cases("backward", dtype, channels_last)


def _iterate_pass_cases(kind: Pass, dtype: torch.dtype, channels_last: bool) -> Iterator[FingerprintCase]:
    measured = list(_iterate_table_shapes(kind, dtype.itemsize, channels_last))
    vector = 16 // dtype.itemsize
    wanted: list[tuple[Shape, GroupNormVariant, bool]] = []
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
        yield make_case(kind, dtype, SampleShape(GROUPS, *shape, channels_last), variant, waits)


def _iterate_table_shapes(kind: Pass, itemsize: int, channels_last: bool) -> Iterator[tuple[Shape, object]]:
    """A sample for each entry of the tables, with the entry's number of positions if it has one.

    Channels-last, backward has the samples of forward's blocks: its own have rules in place of a table.
    """
    if channels_last:
        forward = kind == "forward"
        streams: tuple[tuple[int, int, object], ...]
        streams = tables.FORWARD_STREAM[itemsize] if forward else tables.BACKWARD_STREAM[itemsize]
        blocks = tables.FORWARD_CHANNELS_LAST[itemsize]
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


def make_case(
    kind: Pass, dtype: torch.dtype, sample: SampleShape, variant: GroupNormVariant, waits: bool = True
) -> FingerprintCase:
    """A call with samples of `dtype`; `waits`: whether programs may wait for one another."""
    layout = "channels-last" if sample.channels_last else "contiguous"
    policy = "" if waits else ", nothing waits"
    plan = _plan_forward if kind == "forward" else _plan_backward
    return FingerprintCase(
        f"group_norm {layout} {kind} {SHORT_NAMES[dtype]} "
        f"{variant.samples}x{sample.groups}x{sample.group_channels}x{sample.hw} {variant.name}{policy}",
        partial(plan, dtype, sample, variant),
        unaligned=variant.unaligned,
        may_wait=waits,
        batch_invariant=variant.batch_invariant,
    )


@dataclass(frozen=True, slots=True)
class _GroupNormTensors:
    """Tensors of both forward and backward passes."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    scale: Tensor | None
    shift: Tensor | None

    def affine(self, tensors: MetaTensors) -> AffineParameters:
        return AffineParameters(*map(tensors.describe, (self.weight, self.bias, self.scale, self.shift)))


def _make_like_x(
    tensors: MetaTensors,
    role: str,
    sample: SampleShape,
    samples: int,
    dtype: torch.dtype,
    other_layout: bool = False,
) -> Tensor:
    """[N, C, positions] in the sample's layout or in the other one."""
    if sample.channels_last != other_layout:
        return tensors.make_tensor(role, (samples, sample.hw, sample.c), dtype).movedim(-1, 1)
    return tensors.make_tensor(role, (samples, sample.c, sample.hw), dtype)


def _make_inputs(
    tensors: MetaTensors, dtype: torch.dtype, sample: SampleShape, variant: GroupNormVariant
) -> _GroupNormTensors:
    x = _make_like_x(tensors, "x", sample, variant.samples, dtype)
    of_parameters = choose_other_dtype(dtype) if variant.other_dtypes else dtype
    weight = tensors.make_tensor("weight", (sample.c,), of_parameters) if variant.weight else None
    bias = tensors.make_tensor("bias", (sample.c,), of_parameters) if variant.bias else None
    residual = None
    if variant.residual:
        of_residual = choose_other_dtype(dtype) if variant.residual == "other dtype" else dtype
        otherwise = variant.residual == "other layout"
        residual = _make_like_x(tensors, "residual", sample, variant.samples, of_residual, otherwise)
    scale, shift = None, None
    if variant.adaptive:
        both = tensors.make_tensor("scale_shift", (variant.samples, 2 * sample.c), of_parameters)
        scale, shift = both.chunk(2, 1)
    return _GroupNormTensors(x, weight, bias, residual, scale, shift)


def _make_options(sample: SampleShape, variant: GroupNormVariant) -> NormOptions:
    seed = 7 if variant.dropout else None
    return NormOptions("group_norm", sample.groups, EPS, 0.0, variant.activation, variant.dropout, seed)


def _make_statistics(
    tensors: MetaTensors, sample: SampleShape, variant: GroupNormVariant
) -> tuple[Tensor | None, Tensor | None]:
    if not variant.stats:
        return None, None
    shape = (variant.samples, sample.groups)
    return tensors.make_tensor("mean", shape, torch.float32), tensors.make_tensor("rstd", shape, torch.float32)


def _plan_forward(
    dtype: torch.dtype, sample: SampleShape, variant: GroupNormVariant, tensors: MetaTensors
) -> list[Launch]:
    inputs = _make_inputs(tensors, dtype, sample, variant)
    mean, rstd = _make_statistics(tensors, sample, variant)
    residual_out = inputs.residual
    if inputs.residual is not None and variant.residual != "in place":
        residual_out = _make_like_x(tensors, "residual_out", sample, variant.samples, dtype)
    of_y = choose_other_dtype(dtype) if variant.other_dtypes else dtype
    y = _make_like_x(tensors, "y", sample, variant.samples, of_y)
    describe = tensors.describe
    call = GroupNormForwardCall(
        x=describe(inputs.x),
        sample=sample,
        affine=inputs.affine(tensors),
        options=_make_options(sample, variant),
        residual=describe(inputs.residual),
        out=Forward(*map(describe, (y, mean, rstd, residual_out))),
    )
    return plan_forward(call)


def _plan_backward(
    dtype: torch.dtype, sample: SampleShape, variant: GroupNormVariant, tensors: MetaTensors
) -> list[Launch]:
    inputs = _make_inputs(tensors, dtype, sample, variant)
    mean, rstd = _make_statistics(tensors, sample, variant)
    of_dy = choose_other_dtype(dtype) if variant.other_dtypes else dtype
    dy = _make_like_x(tensors, "dy", sample, variant.samples, of_dy, variant.other_layout)
    outside = None
    if inputs.residual is not None if variant.has_dresidual_out is None else variant.has_dresidual_out:
        otherwise = variant.residual == "other layout"
        outside = _make_like_x(tensors, "dresidual_out", sample, variant.samples, dtype, otherwise)
    dx = _make_like_x(tensors, "dx", sample, variant.samples, dtype)
    dweight, dbias, dscale, dshift = (
        None if parameter is None else tensors.make_tensor(role, tuple(parameter.shape), parameter.dtype)
        for role, parameter in (
            ("dweight", inputs.weight), ("dbias", inputs.bias), ("dscale", inputs.scale), ("dshift", inputs.shift)
        )
    )  # fmt: skip
    describe = tensors.describe
    place = describe(dx)
    dresidual = None if inputs.residual is None else place
    call = GroupNormBackwardCall(
        dy=describe(dy),
        x=describe(inputs.x),
        sample=sample,
        affine=inputs.affine(tensors),
        options=_make_options(sample, variant),
        mean=describe(mean),
        rstd=describe(rstd),
        residual=describe(inputs.residual),
        dresidual_out=describe(outside),
        out=Backward(
            place, describe(dweight), describe(dbias), dresidual, dscale=describe(dscale), dshift=describe(dshift)
        ),
    )
    return plan_backward(call)
