"""The workload: a seeded pool of requests, and how often each is drawn.

    [workload]
    mix = { layer_norm = 3, "group_norm/backward" = 1 }   # operations and their relative frequencies
    min_kib = 1                 # size of x; sizes are distributed evenly on a logarithmic scale
    max_mib = 1.0
    pool = 64                   # number of different requests

or, instead, individual requests:

    [[workload.cases]]
    operation = "layer_norm"
    shape = [4096, 1024]
    dtype = "bfloat16"          # float32 if left out
    share = 2                   # relative frequency
    activation = "silu"         # and other attributes of `RequestCase`

The same seed gives the same requests, whatever the server and however many processes send them.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from normserve.client import DType
from normserve.memory.tensors import FLOATS

from normload.load.request_cases import (
    DEFAULT_SLOPE,
    DRAWN_ACTIVATIONS,
    LAYOUTS,
    MOST_NORMS,
    MOST_PARTS,
    OPERATIONS,
    RequestCase,
)
from normload.load.toml_tables import MOST, ScenarioError, TomlTable, format_value, is_number

#: The default relative frequency of each operation.
DEFAULT_MIX: Mapping[str, float] = {
    "layer_norm": 3,
    "rms_norm": 3,
    "group_norm": 2,
    "layer_norm/backward": 1,
    "rms_norm/backward": 1,
    "group_norm/backward": 1,
    "layer_norm_chain": 1,
}

# Widths of real models and, at the end, some without a fast path.
_COLS = (64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 5120, 8192, 1, 129, 1000, 5000)
_CHANNELS_AND_GROUPS = ((32, 32), (64, 32), (128, 32), (320, 32), (512, 32), (96, 1), (30, 3), (64, 64))
_HEADS = (2, 8, 32)
_TOKENS_OF_SAMPLES = (1, 16, 256)
_SIDES = (1, 3, 8, 16, 32, 56, 64)

# Limit for gradients of parameters of each head.
_MOST_COLS_OF_HEADS = 8192

_MOST_MIB = 2**14
_MOST_REQUESTS = 100_000


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run, or how they are drawn at random.

    Attributes:
        cases: requests and their relative frequencies; if empty, the other attributes define the requests.
        mix: operations and their relative frequencies.
        min_bytes, max_bytes: limits of x's size.
        pool: number of different requests.
    """

    cases: tuple[tuple[RequestCase, float], ...] = ()
    mix: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_MIX))
    min_bytes: int = 1024
    max_bytes: int = 2**20
    pool: int = 64

    def list_operations(self) -> list[str]:
        """List the operations of the requests, sorted."""
        return sorted({case.operation for case, _ in self.cases} if self.cases else self.mix)

    def draw_cases(self, seed: int) -> list[tuple[RequestCase, float]]:
        """Return the run's requests with their relative frequencies: those of the scenario, or `pool` random
        ones.
        """
        choices = random.Random(seed)
        if self.cases:
            return [(replace(case, seed=choices.getrandbits(32)), share) for case, share in self.cases]
        operations = choices.choices(list(self.mix), list(self.mix.values()), k=self.pool)
        return [(_split_sometimes(self._draw_case(operation, choices), choices), 1.0) for operation in operations]

    def _draw_case(self, operation: str, choices: random.Random) -> RequestCase:
        """Draw a request of an operation at random: element type, size within the limits, shape and options."""
        dtype = choices.choice(FLOATS)
        low = min(self.min_bytes, self.max_bytes)
        elements = int(low * (self.max_bytes / low) ** choices.random()) // dtype.itemsize
        activation, residual = choices.choice(DRAWN_ACTIVATIONS), choices.random() < 0.3
        affine, seed = choices.random() < 0.8, choices.getrandbits(32)
        if not operation.startswith("group_norm"):
            cols = choices.choice([cols for cols in _COLS if cols <= elements] or [1])
            shape: tuple[int, ...] = (max(1, elements // cols), cols)
            if operation == "layer_norm_chain":
                return RequestCase(operation, shape, dtype, seed=seed, norms=choices.randint(1, MOST_NORMS))
            case = RequestCase(operation, shape, dtype, activation, residual, affine, seed=seed)
            return _add_model_options_at_random(case, choices)
        fitting = [pair for pair in _CHANNELS_AND_GROUPS if pair[0] <= elements]
        channels, groups = choices.choice(fitting or [(1, 1)])
        side = choices.choice([side for side in _SIDES if channels * side**2 <= elements] or [1])
        batch = max(1, elements // (channels * side**2))
        layout = choices.choice(LAYOUTS)
        shape = (batch, channels, side, side) if layout == "nchw" else (batch, side, side, channels)
        adaptive = choices.random() < 0.3
        return RequestCase(operation, shape, dtype, activation, residual, affine, groups, layout, seed, adaptive)


def _add_model_options_at_random(case: RequestCase, choices: random.Random) -> RequestCase:
    """Return the LayerNorm or RMSNorm request; some requests, chosen at random, get options that real models use.

    These are a weight offset, a float32 residual, heads with own weights, a norm over the channels of images,
    float8 output, and scale and shift, with a residual also gate, for each sample.
    """
    rows, cols = case.shape
    if case.affine and choices.random() < 0.2:
        case = replace(case, weight_offset=1)
    if case.residual and choices.random() < 0.3:
        case = replace(case, residual_dtype=DType.FLOAT32)
    fitting = [heads for heads in _HEADS if heads <= rows]
    if case.affine and fitting and cols <= _MOST_COLS_OF_HEADS and choices.random() < 0.2:
        heads = choices.choice(fitting)
        case = replace(case, heads=True, shape=(rows // heads, heads, cols))
    if case.heads:
        return case
    if choices.random() < 0.2:
        side = choices.choice([side for side in _SIDES if side**2 <= rows] or [1])
        is_adaptive = choices.random() < 0.2
        return replace(case, layout="nchw", shape=(rows // side**2, cols, side, side), adaptive=is_adaptive)
    if not case.is_backward and choices.random() < 0.1:
        case = replace(case, out_dtype=DType.FLOAT8_E4M3FN)
    if choices.random() < 0.2:
        tokens = choices.choice([tokens for tokens in _TOKENS_OF_SAMPLES if tokens <= rows])
        case = replace(case, adaptive=True, shape=(rows // tokens, tokens, cols))
    return case


def _split_sometimes(case: RequestCase, choices: random.Random) -> RequestCase:
    """Return the request; with a probability of 10 %, its rows or samples are split into several tensors."""
    if choices.random() < 0.1 and case.shape[0] > 1:
        return replace(case, parts=choices.randint(2, min(MOST_PARTS, case.shape[0])))
    return case


def read_workload(table: TomlTable) -> Workload:
    """Read the table `[workload]`: individual requests, or the mix from which requests are drawn.

    Raises:
        ScenarioError: the table is not valid.
    """
    if cases := tuple(_read_case(each) for each in table.take_tables_or_empty("cases")):
        for key in ("mix", "min_kib", "max_mib", "pool"):
            if table.has_key(key):
                raise ScenarioError(f"{table.location}: {key} has no effect with [[workload.cases]]")
        workload = Workload(cases=cases)
    else:
        has_mix, has_minimum = table.has_key("mix"), table.has_key("min_kib")
        mix = table.take_table("mix")
        workload = Workload(
            mix=_read_mix(mix.location, mix.take_remaining()) if has_mix else DEFAULT_MIX,
            min_bytes=max(1, int(table.take_positive_number("min_kib", 1.0, _MOST_MIB * 2**10) * 2**10)),
            max_bytes=max(1, int(table.take_positive_number("max_mib", 1.0, _MOST_MIB) * 2**20)),
            pool=table.take_positive_count("pool", 64, _MOST_REQUESTS),
        )
        if has_minimum and workload.min_bytes > workload.max_bytes:
            raise ScenarioError(
                f"{table.location}: min_kib must be at most max_mib, in bytes "
                f"{workload.max_bytes}, got {workload.min_bytes}"
            )
    table.check_no_unknown_keys()
    return workload


def _read_mix(where: str, entries: Mapping[str, Any]) -> dict[str, float]:
    """Check and return the relative frequency of each operation.

    Raises:
        ScenarioError: there is no operation, one is unknown, or a frequency is not a finite number above 0.
    """
    if not entries:
        raise ScenarioError(f"{where}: there must be at least one of {', '.join(OPERATIONS)}")
    for operation, share in entries.items():
        if operation not in OPERATIONS:
            raise ScenarioError(f"{where}: an operation must be one of {', '.join(OPERATIONS)}, got {operation!r}")
        if not is_number(share) or not 0 < share <= MOST:
            raise ScenarioError(f"{where}: {operation} must have a finite share above 0, got {format_value(share)}")
    return dict(entries)


def _read_case(table: TomlTable) -> tuple[RequestCase, float]:
    """Read one table of `[[workload.cases]]`: a request and its relative frequency.

    Raises:
        ScenarioError: a key is not valid, or does not fit the others.
    """
    case = RequestCase.from_table(table)
    share = table.take_positive_number("share", 1.0)
    table.check_no_unknown_keys()
    for key, op in (("norms", "layer_norm_chain"), ("num_groups", "group_norm")):
        if case.op == op and not getattr(case, key):
            raise ScenarioError(f"{table.location}: {key} is missing")
    if case.op != "layer_norm_chain" and case.norms:
        raise ScenarioError(f"{table.location}: norms belongs to layer_norm_chain, and only there")
    if case.norms and case != RequestCase(
        case.operation, case.shape, case.dtype, out_dtype=case.out_dtype, norms=case.norms, parts=case.parts
    ):
        raise ScenarioError(
            f"{table.location}: layer_norm_chain takes shape, dtype, out_dtype, norms and parts alone"
        )
    if case.parts and (len(case.shape) < 2 or case.shape[0] < case.parts):
        raise ScenarioError(
            f"{table.location}: parts need a shape of at least two sizes, the first as large as they are many"
        )
    is_group_norm = case.op == "group_norm"
    if not is_group_norm and case.num_groups:
        raise ScenarioError(f"{table.location}: num_groups belongs to group_norm, and only there")
    if is_group_norm and (len(case.shape) < 2 or case.shape[case.channel_axis] % case.num_groups):
        raise ScenarioError(f"{table.location}: num_groups must divide the channels of {list(case.shape)}")
    if case.adaptive and len(case.shape) < 2:
        raise ScenarioError(
            f"{table.location}: adaptive needs a shape of at least two sizes, got {list(case.shape)}"
        )
    if case.adaptive and case.heads:
        raise ScenarioError(f"{table.location}: adaptive does not belong to heads")
    if is_group_norm and (case.weight_offset or case.heads):
        raise ScenarioError(f"{table.location}: weight_offset and heads belong to layer_norm and rms_norm")
    if case.negative_slope != DEFAULT_SLOPE and case.activation != "leaky_relu":
        raise ScenarioError(f"{table.location}: negative_slope belongs to the activation leaky_relu")
    if (case.weight_offset or case.heads) and not case.affine:
        raise ScenarioError(f"{table.location}: weight_offset and heads need affine")
    if case.out_dtype is not None and case.is_backward:
        raise ScenarioError(f"{table.location}: out_dtype belongs to forward passes")
    if case.layout == "nchw" and len(case.shape) < 2:
        raise ScenarioError(
            f"{table.location}: layout nchw needs a shape of at least two sizes, got {list(case.shape)}"
        )
    if case.layout == "nchw" and case.heads:
        raise ScenarioError(f"{table.location}: layout nchw does not belong to heads")
    if case.out_dtype is DType.FLOAT8_E4M3FN and (
        is_group_norm or case.norms or case.heads or case.layout == "nchw"
    ):
        raise ScenarioError(
            f"{table.location}: float8_e4m3fn belongs to layer_norm and rms_norm without heads and layout nchw"
        )
    if case.heads and len(case.shape) < 2:
        raise ScenarioError(f"{table.location}: heads need a shape of at least two sizes, got {list(case.shape)}")
    return case, share
