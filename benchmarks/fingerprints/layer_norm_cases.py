"""Cases of LayerNorm and RMSNorm: rows at the limits of every table's entries, in every variant of a call.

As are the channels of contiguous samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from fusednorm import ActivationName
from fusednorm.api.chain import MAX_NORMS
from fusednorm.arguments.arrays import Array
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.launches import Launch
from fusednorm.ops.layer_norm import config_tables as tables
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.chain import ChainCall
from fusednorm.ops.layer_norm.channels_first import config_tables as channel_tables
from fusednorm.ops.layer_norm.choices import plan_backward, plan_chain, plan_forward
from fusednorm.results import Backward, Forward
from fusednorm.tensors.arrays import FLOAT8
from torch import Tensor

from benchmarks.fingerprints.cases import DTYPES, SHORT_NAMES, FingerprintCase, MetaTensors, choose_other_dtype

ROWS, TOKENS, HEADS, SAMPLES = 4096, 512, 4, 8
EPS = 1e-5
VECTORS = 49
"""Number of a sample's positions over whose channels is normalised, in vectors of one access."""

LONGEST = 1 << 23
"""Number of columns of a row, too many for all programs of a device to hold together."""

Pass = Literal["forward", "backward", "float8"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "float8")
CHANNEL_PASSES: tuple[Pass, ...] = ("forward", "backward")
"""The passes of rows, and those over the channels of contiguous samples."""


@dataclass(frozen=True, slots=True)
class LayerNormVariant:
    """The options of a call.

    Attributes:
        residual: "own" with a separate result, "in place", or of the "other dtype".
        has_dresidual_out: whether dresidual_out is given; by default, if there is a residual.
        other_dtypes: whether the parameters and y have another dtype.
        heads: x is [tokens, heads, cols]: "shared" parameters for the heads of a wider tensor, "own" parameters for
            each of packed heads, or "uniform": own parameters for padded rows.
        modulations: x is [samples, tokens, cols] with these tensors of each sample, which are parts of a wider one.
        positions: x is contiguous samples [samples, cols, positions], and its rows go along the columns.
        rows: number of rows of x, without heads, samples and positions.
        tokens: number of tokens of x with heads, or of each sample.
    """

    name: str
    weight: bool = True
    bias: bool = True
    is_rms: bool = False
    weight_offset: float = 0.0
    stats: bool = False
    residual: Literal["", "own", "in place", "other dtype"] = ""
    has_dresidual_out: bool | None = None
    activation: ActivationName = "none"
    dropout: float = 0.0
    other_dtypes: bool = False
    unaligned: bool = False
    heads: Literal["", "shared", "own", "uniform"] = ""
    modulations: tuple[Literal["scale", "shift", "gate"], ...] = ()
    positions: int = 0
    rows: int = ROWS
    tokens: int = TOKENS


PLAIN = LayerNormVariant("plain")
FUSED = LayerNormVariant("fused", stats=True, residual="own", activation="silu", dropout=0.1)
USUAL = (
    PLAIN,
    FUSED,
    LayerNormVariant("stats", stats=True),
    LayerNormVariant("residual", residual="own"),
    LayerNormVariant("silu", activation="silu"),
    LayerNormVariant("dropout", dropout=0.1),
    LayerNormVariant("rms", bias=False, is_rms=True),
    LayerNormVariant("one row", rows=1),
    LayerNormVariant("adaptive", weight=False, bias=False, modulations=("scale", "shift")),
    LayerNormVariant(
        "gated", weight=False, bias=False, stats=True, residual="own", modulations=("scale", "shift", "gate")
    ),
)
"""Variants for the longest row of every entry of a table."""

RARE = (
    LayerNormVariant("bare", weight=False, bias=False),
    LayerNormVariant("weight alone", bias=False),
    LayerNormVariant("bias alone", weight=False),
    LayerNormVariant("rms stats offset", bias=False, is_rms=True, stats=True, weight_offset=1.0),
    LayerNormVariant(
        "rms fused", bias=False, is_rms=True, stats=True, residual="own", activation="gelu_tanh", dropout=0.5
    ),
    LayerNormVariant("residual in place", residual="in place"),
    LayerNormVariant("residual other dtype", residual="other dtype"),
    LayerNormVariant("residual other dtype stats", residual="other dtype", stats=True),
    LayerNormVariant("relu", activation="relu"),
    LayerNormVariant("leaky_relu", activation="leaky_relu"),
    LayerNormVariant("gelu", activation="gelu"),
    LayerNormVariant("gelu_tanh", activation="gelu_tanh"),
    LayerNormVariant("other dtypes", other_dtypes=True),
    LayerNormVariant("unaligned", unaligned=True),
    LayerNormVariant("heads", heads="shared"),
    LayerNormVariant("heads own", heads="own", stats=True),
    LayerNormVariant("heads uniform", heads="uniform", residual="own", activation="silu"),
    LayerNormVariant("few rows", rows=7),
    LayerNormVariant("residual alone", residual="own", has_dresidual_out=False),
    LayerNormVariant("dresidual_out alone", has_dresidual_out=True),
    LayerNormVariant("scale", modulations=("scale",)),
    LayerNormVariant("shift other dtypes", modulations=("shift",), other_dtypes=True),
    LayerNormVariant("gate", stats=True, residual="own", modulations=("gate",)),
    LayerNormVariant(
        "gated rms fused",
        bias=False,
        is_rms=True,
        residual="other dtype",
        activation="silu",
        dropout=0.1,
        modulations=("scale", "shift", "gate"),
    ),
    LayerNormVariant("adaptive, fused", stats=True, activation="gelu", modulations=("scale", "shift")),
    LayerNormVariant("adaptive tokens", modulations=("scale", "shift"), tokens=1),
)
"""Variants for one row length of every algorithm."""

USUAL_OF_CHANNELS, CHANNEL_VARIANTS = (
    tuple(each for each in variants if not each.heads and (each.rows, each.tokens) == (ROWS, TOKENS))
    for variants in (USUAL, (*USUAL, *RARE))
)
"""Variants that positions may have: for every entry of a table, and for one of every algorithm."""


def iterate_cases() -> Iterator[FingerprintCase]:
    """All cases, under each policy."""
    for dtype in DTYPES:
        for kind in PASSES:
            yield from _iterate_pass_cases(kind, dtype)
        for kind in CHANNEL_PASSES:
            yield from _iterate_channel_cases(kind, dtype)
        yield from _iterate_chain_cases(dtype)


def _iterate_pass_cases(kind: Pass, dtype: torch.dtype) -> Iterator[FingerprintCase]:
    of_tables = list(iterate_table_lengths(kind, dtype.itemsize))
    vector = 16 // dtype.itemsize
    done: set[tuple[int, LayerNormVariant, bool]] = set()
    algorithms: set[type] = set()
    for cols, config in of_tables:
        rare = RARE if type(config) not in algorithms else ()
        algorithms.add(type(config))
        wanted = [(cols, variant) for variant in (*USUAL, *rare)]
        wanted += [(length, variant) for length in (cols - vector, cols - 1) for variant in (PLAIN, FUSED)]
        # Also the configurations for programs that may not wait.
        waiting = [(*each, True) for each in wanted] + [(cols, PLAIN, False), (cols, FUSED, False)]
        for length, variant, waits in waiting:
            if length > 0 and (length, variant, waits) not in done:
                done.add((length, variant, waits))
                yield make_case(kind, dtype, length, variant, waits)


def _iterate_channel_cases(kind: Pass, dtype: torch.dtype) -> Iterator[FingerprintCase]:
    algorithms: set[type] = set()
    for channels, vector, config in iterate_table_channels(kind, dtype.itemsize):
        positions = VECTORS * vector
        rare = CHANNEL_VARIANTS if type(config) not in algorithms else ()
        algorithms.add(type(config))
        wanted = [(channels, positions, variant) for variant in dict.fromkeys((*USUAL_OF_CHANNELS, *rare))]
        wanted += [(channels - 1, positions, variant) for variant in (PLAIN, FUSED)]
        # Whole tiles of positions.
        wanted += [(channels, 128 * vector, variant) for variant in (PLAIN, FUSED)]
        for count, size, variant in wanted:
            yield make_case(kind, dtype, count, replace(variant, positions=size))


def iterate_table_channels(kind: Pass, itemsize: int) -> Iterator[tuple[int, int, object]]:
    """The most channels, the elements of an access and the configuration of each entry of the tables over channels.

    After the last entry of each table, it is more channels than a program holds.
    """
    table = channel_tables.FORWARD if kind == "forward" else channel_tables.BACKWARD
    for (of_element, access), entries in table.items():
        if of_element == itemsize:
            vector = access // itemsize
            yield from ((limit, vector, config) for limit, config in entries)
            yield 2 * entries[-1][0], vector, None


def iterate_table_lengths(kind: Pass, itemsize: int) -> Iterator[tuple[int, object]]:
    """A row length for each entry of the tables, its longest one if that is within limits."""
    if kind == "float8":
        yield from tables.TILES
        longest = tables.TILES[-1][0]
        yield from ((longest * factor, longest * factor) for factor in (2, 4, 8))
        return
    ranges: tuple[tuple[int, int, object], ...]
    if kind == "forward":
        limits: tuple[tuple[int, object], ...] = tables.FORWARD[itemsize]
        ranges = tables.FORWARD_UNALIGNED[itemsize] + tables.FORWARD_WITH_RESIDUAL[itemsize]
        for has_residual in (False, True):
            ranges += tables.FORWARD_MODULATED[itemsize, has_residual]
    else:
        limits, ranges = tables.BACKWARD[itemsize], tables.BACKWARD_UNALIGNED[itemsize]
        ranges += tuple((0, *each) for each in tables.BACKWARD_UNSHARED[itemsize])
        ranges += tables.BACKWARD_WITH_EPILOGUE[itemsize] + tables.BACKWARD_WITH_GATE[itemsize]
    before = 0
    for limit, config in limits:
        yield (2 * before if limit >= LONGEST else limit), config
        before = limit
    yield from ((last, config) for _, last, config in ranges)
    yield LONGEST, None


def make_case(
    kind: Pass, dtype: torch.dtype, cols: int, variant: LayerNormVariant, waits: bool = True
) -> FingerprintCase:
    """A call over `cols` columns or channels of `dtype`; `waits`: whether programs may wait for one another."""
    policy = "" if waits else ", nothing waits"
    plan = {"forward": _plan_forward, "backward": _plan_backward, "float8": _plan_float8}[kind]
    shape = f"{SAMPLES}x{cols}x{variant.positions}" if variant.positions else f"{variant.rows}x{cols}"
    name = f"layer_norm {kind} {SHORT_NAMES[dtype]} {shape} {variant.name}{policy}"
    return FingerprintCase(name, partial(plan, dtype, cols, variant), unaligned=variant.unaligned, may_wait=waits)


@dataclass(frozen=True, slots=True)
class _LayerNormTensors:
    """Tensors of both forward and backward passes."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    modulations: dict[str, Tensor]

    def describe(self, tensors: MetaTensors) -> dict[str, Any]:
        """The descriptions of the tensors, by name."""
        named = {name: getattr(self, name) for name in ("x", "weight", "bias", "residual")}
        return {name: tensors.describe(tensor) for name, tensor in (named | self.modulations).items()}


def _make_rows(tensors: MetaTensors, role: str, cols: int, dtype: torch.dtype, variant: LayerNormVariant) -> Tensor:
    """An input of [rows, cols], or [tokens, heads, cols] if the variant has heads, or samples in their place.

    If it has positions, it is [positions, samples, cols].
    """
    if variant.positions:
        return tensors.make_tensor(role, (SAMPLES, cols, variant.positions), dtype).permute(2, 0, 1)
    if variant.modulations:
        return tensors.make_tensor(role, (SAMPLES, variant.tokens, cols), dtype).transpose(0, 1)
    if variant.heads == "shared":
        return tensors.make_tensor(role, (variant.tokens, 3 * HEADS, cols), dtype)[:, :HEADS]
    if variant.heads == "own":
        return tensors.make_tensor(role, (variant.tokens, HEADS, cols), dtype)
    if variant.heads == "uniform":
        return tensors.make_tensor(role, (variant.tokens, HEADS, cols + 64), dtype)[..., :cols]
    return tensors.make_tensor(role, (variant.rows, cols), dtype)


def _make_inputs(
    tensors: MetaTensors, dtype: torch.dtype, cols: int, variant: LayerNormVariant
) -> _LayerNormTensors:
    x = _make_rows(tensors, "x", cols, dtype, variant)
    of_parameters = choose_other_dtype(dtype) if variant.other_dtypes else dtype
    shape = (HEADS, cols) if variant.heads in ("own", "uniform") else (cols,)
    weight = tensors.make_tensor("weight", shape, of_parameters) if variant.weight else None
    bias = tensors.make_tensor("bias", shape, of_parameters) if variant.bias else None
    of_residual = choose_other_dtype(dtype) if variant.residual == "other dtype" else dtype
    residual = _make_rows(tensors, "residual", cols, of_residual, variant) if variant.residual else None
    modulations: dict[str, Tensor] = {}
    if variant.modulations:
        wide = tensors.make_tensor("modulations", (SAMPLES, 6, cols), of_parameters)
        modulations.update({name: wide[:, at] for at, name in enumerate(variant.modulations)})
    return _LayerNormTensors(x, weight, bias, residual, modulations)


def _make_options(variant: LayerNormVariant) -> NormOptions:
    op, seed = "rms_norm" if variant.is_rms else "layer_norm", 7 if variant.dropout else None
    return NormOptions(op, 0, EPS, variant.weight_offset, variant.activation, variant.dropout, seed)


def _make_statistics(
    tensors: MetaTensors, x: Tensor, variant: LayerNormVariant
) -> tuple[Tensor | None, Tensor | None]:
    if not variant.stats:
        return None, None
    of_rows = tuple(x.shape[:-1])
    mean = None if variant.is_rms else tensors.make_tensor("mean", of_rows, torch.float32)
    return mean, tensors.make_tensor("rstd", of_rows, torch.float32)


def _make_results(
    tensors: MetaTensors,
    inputs: _LayerNormTensors,
    dtype: torch.dtype,
    variant: LayerNormVariant,
    y_scale: Tensor | None,
) -> Forward:
    x, residual = inputs.x, inputs.residual
    mean, rstd = _make_statistics(tensors, x, variant)
    if residual is None or variant.residual == "in place":
        residual_out = residual
    else:
        residual_out = tensors.make_tensor("residual_out", tuple(x.shape), residual.dtype)
    return Forward(tensors.make_tensor("y", tuple(x.shape), dtype), mean, rstd, residual_out, y_scale)


def _plan_forward(dtype: torch.dtype, cols: int, variant: LayerNormVariant, tensors: MetaTensors) -> list[Launch]:
    inputs = _make_inputs(tensors, dtype, cols, variant)
    of_y = choose_other_dtype(dtype) if variant.other_dtypes else dtype
    out = _make_results(tensors, inputs, of_y, variant, None)
    return plan_forward(_make_forward_call(tensors, inputs, variant, out))


def _plan_float8(dtype: torch.dtype, cols: int, variant: LayerNormVariant, tensors: MetaTensors) -> list[Launch]:
    inputs = _make_inputs(tensors, dtype, cols, variant)
    y_scale = tensors.make_tensor("y_scale", tuple(inputs.x.shape[:-1]), torch.float32)
    out = _make_results(tensors, inputs, FLOAT8, variant, y_scale)
    return plan_forward(_make_forward_call(tensors, inputs, variant, out))


def _make_forward_call(
    tensors: MetaTensors, inputs: _LayerNormTensors, variant: LayerNormVariant, out: Forward
) -> LayerNormForwardCall:
    results: Forward[Array] = Forward(*map(tensors.describe, out))
    return LayerNormForwardCall(**inputs.describe(tensors), options=_make_options(variant), out=results)


def _plan_backward(dtype: torch.dtype, cols: int, variant: LayerNormVariant, tensors: MetaTensors) -> list[Launch]:
    inputs = _make_inputs(tensors, dtype, cols, variant)
    x, residual = inputs.x, inputs.residual
    mean, rstd = _make_statistics(tensors, x, variant)
    of_dy = choose_other_dtype(dtype) if variant.other_dtypes else dtype
    dy = _make_rows(tensors, "dy", cols, of_dy, variant)
    comes = residual is not None if variant.has_dresidual_out is None else variant.has_dresidual_out
    of_outside = dtype if residual is None else residual.dtype
    outside = _make_rows(tensors, "dresidual_out", cols, of_outside, variant) if comes else None
    dx = tensors.make_tensor("dx", tuple(x.shape), dtype)
    dresidual = None if residual is None else dx
    if residual is not None and (residual.dtype != dtype or "gate" in variant.modulations):
        dresidual = tensors.make_tensor("dresidual", tuple(x.shape), residual.dtype)
    describe = tensors.describe
    place = describe(dx)
    gradients = {
        f"d{name}": describe(tensors.make_tensor(f"d{name}", tuple(parameter.shape), parameter.dtype))
        for name, parameter in {"weight": inputs.weight, "bias": inputs.bias, **inputs.modulations}.items()
        if parameter is not None
    }
    return plan_backward(
        LayerNormBackwardCall(
            **inputs.describe(tensors),
            options=_make_options(variant),
            dy=describe(dy),
            mean=describe(mean),
            rstd=describe(rstd),
            dresidual_out=describe(outside),
            out=Backward(place, dresidual=place if dresidual is dx else describe(dresidual), **gradients),
        )
    )


def _iterate_chain_cases(dtype: torch.dtype) -> Iterator[FingerprintCase]:
    """Each row length that is held, and one that is not, with two norms; each number of norms at one length."""
    held = [limit for limit, _ in tables.TILES]
    numbers = [(1024, norms) for norms in range(1, MAX_NORMS + 1)]
    numbers += [(2 * held[-1], norms) for norms in (1, 3, MAX_NORMS)]
    lengths = [(length, 2) for limit in (*held, 2 * held[-1]) for length in (limit, limit - 1)]
    for cols, norms in dict.fromkeys(lengths + numbers):
        for unaligned in (False, True) if (cols, norms) in numbers else (False,):
            yield make_chain_case(dtype, cols, norms, unaligned)


def make_chain_case(
    dtype: torch.dtype, cols: int, norms: int, unaligned: bool = False, rows: int = ROWS
) -> FingerprintCase:
    """A chain of `norms` norms over rows of `cols` columns."""
    suffix = " unaligned" if unaligned else ""
    name = f"layer_norm chain {SHORT_NAMES[dtype]} {rows}x{cols} of {norms}{suffix}"
    return FingerprintCase(name, partial(_plan_chain, dtype, rows, cols, norms), unaligned=unaligned)


def _plan_chain(dtype: torch.dtype, rows: int, cols: int, norms: int, tensors: MetaTensors) -> list[Launch]:
    """A chain of which some parameters are absent."""
    x, y = (tensors.make_tensor(role, (rows, cols), dtype) for role in ("x", "y"))
    weights, biases = (
        tuple(
            None if index % 3 == absent else tensors.make_tensor(f"{role}[{index}]", (cols,), dtype)
            for index in range(norms)
        )
        for role, absent in (("weights", 2), ("biases", 1))
    )
    describe = tensors.describe
    of_weights, of_biases = (tuple(map(describe, each)) for each in (weights, biases))
    return plan_chain(ChainCall(describe(x), of_weights, of_biases, EPS, describe(y)))
