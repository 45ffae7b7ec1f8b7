"""Query parameters: one table of their names, meanings and parsers."""

import difflib
import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from normserve.codec.activations import ACTIVATIONS
from normserve.errors import InvalidParameterError
from normserve.jobs.job import LAYER_OPS, Layout, NormSpec, Op, Pass
from normserve.jobs.tensor_names import MAX_NORMS
from normserve.layers.registry import LAYER_NAMES, is_layer_name
from normserve.memory.host_tensors import FLOATS, DType

_DEFAULT_EPS = {Op.LAYER_NORM: 1e-5, Op.RMS_NORM: 1e-6, Op.GROUP_NORM: 1e-5, Op.LAYER_NORM_CHAIN: 1e-5}
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_MAX_FIELDS = 64
# What an error repeats of a name.
_MAX_NAMED = 64


def _number(text: str) -> float:
    if len(text) > 64 or not _NUMBER.fullmatch(text):
        raise ValueError("a number")
    return float(text)


def _whole(text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise ValueError("a whole number")
    return int(text)


def _eps(text: str) -> float:
    value = _number(text)
    try:
        # Kernels compute with eps as a float32, so that is what must be positive and finite.
        rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = math.inf
    if not 0 < rounded < math.inf:
        raise ValueError("a float32 above 0 and finite")
    return value


def _num_groups(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise ValueError("a whole number of at least 1")
    return value


def _weight_offset(text: str) -> float:
    value = _number(text)
    if value not in (0.0, 1.0):
        raise ValueError("0 or 1")
    return value


def _dropout(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1:
        raise ValueError("a probability in [0, 1)")
    return value


def _seed(text: str) -> int:
    value = _whole(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError("a 64-bit signed integer")
    return value


def _flag(text: str) -> bool:
    if text not in ("true", "false", "1", "0"):
        raise ValueError("true or false")
    return text in ("true", "1")


def _timeout(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 86_400_000:
        raise ValueError("milliseconds above 0, a day at most")
    return value


def _layer(text: str) -> str:
    if not is_layer_name(text):
        raise ValueError(LAYER_NAMES)
    return text


def _layers(text: str) -> str:
    names = text.split(",")
    if len(names) > MAX_NORMS or not all(map(is_layer_name, names)):
        raise ValueError(f"1 to {MAX_NORMS} names of layers, joined by commas, each {LAYER_NAMES}")
    return text


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError("one of " + ", ".join(names))
        return text

    return parse


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """One query parameter.

    Attributes:
        parse: from text to value; a ValueError's message ends the sentence "name must be …".
        schema: its JSON schema, for the API's description.
    """

    name: str
    doc: str
    parse: Callable[[str], Any]
    schema: dict[str, Any]


_OP_NAMES = [op.value for op in LAYER_OPS]
_OP = Parameter("op", "The operation.", _one_of(_OP_NAMES), {"enum": _OP_NAMES})
_EPS = Parameter("eps", "Added to the variance; 1e-5, or 1e-6 for rms_norm, by default.", _eps, {"type": "number"})
_NUM_GROUPS = Parameter("num_groups", "Divides the channels.", _num_groups, {"type": "integer", "minimum": 1})
_LAYOUT = Parameter("layout", "Where the channels lie.", _one_of(["nchw", "nhwc"]), {"enum": ["nchw", "nhwc"]})
_ACTIVATION = Parameter(
    "activation", "Applied after the affine step.", _one_of(ACTIVATIONS), {"enum": list(ACTIVATIONS)}
)
_WEIGHT_OFFSET = Parameter(
    "weight_offset",
    "Added to weight: 1 for a weight that is kept around zero, as Gemma's; 0 by default.",
    _weight_offset,
    {"enum": [0, 1]},
)
_DROPOUT = Parameter("dropout", "Probability of a zero, applied last.", _dropout, {"type": "number"})
_SEED = Parameter("seed", "Of the dropout mask; required with dropout.", _seed, {"type": "integer"})
_LAYER = Parameter("layer", "A registered layer in place of the parameters.", _layer, {"type": "string"})
_LAYERS = Parameter(
    "layers",
    "Registered layers of layer_norm in place of the parameters, in their order, joined by commas.",
    _layers,
    {"type": "string"},
)
_TIMEOUT = Parameter("timeout_ms", "From arrival to the start of execution, at most.", _timeout, {"type": "number"})


def _out_dtype(doc: str, *dtypes: DType) -> Parameter:
    names = [dtype.value for dtype in dtypes]
    return Parameter("out_dtype", doc, _one_of(names), {"enum": names})


_OUT_DTYPE = _out_dtype("Element type of y; x's by default.", *FLOATS)
_OUT_DTYPE_OF_ROWS = _out_dtype(
    "Element type of y; x's by default. float8_e4m3fn comes with a scale for each row.", *DType
)
_STATS = Parameter("stats", "Also return mean and rstd.", _flag, {"type": "boolean"})

LAYER_PARAMETERS = (_OP, _EPS, _NUM_GROUPS, _WEIGHT_OFFSET, _ACTIVATION)

#: What a layer says in the request's stead.
FIXED_BY_LAYER = ("eps", "num_groups", "weight_offset", "activation")


def operation_parameters(op: Op, direction: Pass, *, float8: bool = True) -> tuple[Parameter, ...]:
    """The parameters that one operation takes.

    Args: float8: whether the protocol can say float8_e4m3fn.
    """
    if op is Op.LAYER_NORM_CHAIN:
        return (_EPS, _OUT_DTYPE, _LAYERS, _TIMEOUT)
    of_op = (_NUM_GROUPS, _LAYOUT) if op is Op.GROUP_NORM else (_WEIGHT_OFFSET,)
    out_dtype = _OUT_DTYPE_OF_ROWS if float8 and op is not Op.GROUP_NORM else _OUT_DTYPE
    of_forward = (out_dtype, _STATS) if direction is Pass.FORWARD else ()
    return (_EPS, *of_op, _ACTIVATION, _DROPOUT, _SEED, *of_forward, _LAYER, _TIMEOUT)


def describe(parameters: Sequence[Parameter]) -> list[dict[str, Any]]:
    """The parameters as OpenAPI describes them."""
    return [
        {"name": p.name, "in": "query", "required": False, "description": p.doc, "schema": p.schema}
        for p in parameters
    ]


def parse_query(raw: bytes, parameters: Sequence[Parameter]) -> dict[str, Any]:
    """Read a query string.

    Raises:
        InvalidParameterError: a name is unknown or repeated, or a value is not what it must be.
    """
    return parse_values(_fields(raw), parameters)


def parse_values(pairs: Iterable[tuple[str, str]], parameters: Sequence[Parameter]) -> dict[str, Any]:
    """Read parameters by name and text, from wherever they came.

    Raises:
        InvalidParameterError: a name is unknown or repeated, or a value is not what it must be.
    """
    known = {parameter.name: parameter for parameter in parameters}
    values: dict[str, Any] = {}
    for name, text in pairs:
        parameter = known.get(name)
        if parameter is None:
            raise InvalidParameterError(_unknown(name, list(known)))
        if name in values:
            raise InvalidParameterError(f"{name} must be given once, got it again")
        try:
            values[name] = parameter.parse(text)
        except ValueError as error:
            raise InvalidParameterError(f"{name} must be {error}, got {text[:64]!r}") from None
    return values


def _fields(raw: bytes) -> list[tuple[str, str]]:
    if not raw:
        return []
    try:
        return parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise InvalidParameterError(f"the query must be at most {_MAX_FIELDS} name=value pairs in UTF-8") from None


def _unknown(name: str, known: list[str]) -> str:
    return f"{name[:_MAX_NAMED]!r} is not a parameter of this operation; {expected_instead(name, known)}"


def expected_instead(name: str, known: Collection[str]) -> str:
    """The end of an error about an unknown name: the known one that may have been meant, else all of them."""
    closest = difflib.get_close_matches(name[:_MAX_NAMED], known, n=1)
    return f"the closest is {closest[0]!r}" if closest else f"expected {', '.join(known)}"


def make_spec(op: Op, direction: Pass, values: dict[str, Any]) -> NormSpec:
    """The operation that parsed parameters ask for; with a layer, what that says is still missing.

    Raises:
        InvalidParameterError: they contradict one another, or one is missing.
    """
    if named_layer(values) is not None:
        given = [name for name in FIXED_BY_LAYER if name in values]
        if given:
            raise InvalidParameterError(f"{given[0]} belongs to the layer and must not be given with layer")
    elif op is Op.GROUP_NORM and "num_groups" not in values:
        raise InvalidParameterError("num_groups must be given")
    if values.get("dropout") and "seed" not in values:
        raise InvalidParameterError("seed must be given with dropout")
    dropout = values.get("dropout", 0.0)
    out_dtype = values.get("out_dtype")
    return NormSpec(
        op=op,
        direction=direction,
        eps=values.get("eps", _DEFAULT_EPS[op]),
        num_groups=values.get("num_groups", 0),
        layout=Layout(values.get("layout", "nchw")),
        activation=values.get("activation", "none"),
        dropout=dropout,
        seed=values.get("seed") if dropout else None,
        out_dtype=DType(out_dtype) if out_dtype else None,
        stats=values.get("stats", False),
        weight_offset=values.get("weight_offset", 0.0),
    )


def named_layer(values: dict[str, Any]) -> str | None:
    """The registered layer that parsed parameters name, or the chain's layers joined by commas, if any."""
    return values.get("layers") or values.get("layer")


def default_eps(op: Op) -> float:
    """eps of an operation that does not say."""
    return _DEFAULT_EPS[op]
