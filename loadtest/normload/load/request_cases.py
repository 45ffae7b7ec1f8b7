"""The description of a request, from which its tensors are computed."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, Self

import numpy as np
from normserve.client import DType, HostTensor
from normserve.codec.api_names import ACTIVATIONS
from normserve.memory.tensors import FLOATS

from normload.load.element_types import round_to_tensor
from normload.load.toml_tables import TomlTable

OPERATIONS = (
    "layer_norm",
    "rms_norm",
    "group_norm",
    "layer_norm/backward",
    "rms_norm/backward",
    "group_norm/backward",
    "layer_norm_chain",
)
#: The activations of random requests; those that a scenario lists may have any.
DRAWN_ACTIVATIONS = ("none", "leaky_relu", "silu", "gelu_tanh")
LAYOUTS = ("nchw", "nhwc")

DEFAULT_SLOPE = 0.01

MOST_NORMS = 8
MOST_PARTS = 12

_Read = Callable[[TomlTable, str], Any]


def _declare_key(read: _Read, *, is_option: bool = False) -> dict[str, Any]:
    """Make the metadata of a field of `RequestCase`.  Scenarios set this field by a key of the same name.

    Args:
        read: takes the key's value from a scenario's table.
        is_option: whether requests have it as a parameter, by the same name.
    """
    return {"read": read, "is_option": is_option}


def _read_one_of(names: Sequence[str]) -> _Read:
    return lambda table, key: table.take_one_of(key, names)


def _read_dtype(dtypes: Sequence[DType]) -> _Read:
    return lambda table, key: DType(table.take_one_of(key, [dtype.value for dtype in dtypes]))


@dataclass(frozen=True, slots=True)
class RequestCase:
    """The description of one request: operation, shape, types and options.  Its values follow from `seed`.

    Attributes:
        operation: as in the API's path, such as "layer_norm/backward".
        shape, dtype: of x.
        num_groups: of GroupNorm, 0 elsewhere.
        layout: where the channels are in x, "nchw" or "nhwc"; None for the default: nchw of GroupNorm, and nhwc of
            LayerNorm and RMSNorm.
        residual: whether the request has one.
        affine: whether the request has weight and bias.
        adaptive: whether the request has scale and shift for each sample, along x's first axis; with a residual
            also gate, except for GroupNorm.
        seed: of the values.
        weight_offset: 0 or 1, added to weight; not of GroupNorm.
        heads: whether each head of x [..., heads, cols] has weight and bias of its own; not of
            GroupNorm.
        residual_dtype: of the residual; None for x's.
        out_dtype: of y; None for x's.
        norms: number of norms of a chain, 0 elsewhere.
        negative_slope: leaky_relu's factor of negative values.
        parts: number of tensors, with the same parameters, into which x and tensors of its shape are
            split; 0: one.
    """

    operation: str = field(metadata=_declare_key(_read_one_of(OPERATIONS)))
    shape: tuple[int, ...] = field(metadata=_declare_key(TomlTable.take_shape))
    dtype: DType = field(default=DType.FLOAT32, metadata=_declare_key(_read_dtype(FLOATS)))
    activation: str = field(default="none", metadata=_declare_key(_read_one_of(ACTIVATIONS), is_option=True))
    residual: bool = field(default=False, metadata=_declare_key(TomlTable.take_flag))
    affine: bool = field(default=True, metadata=_declare_key(TomlTable.take_flag))
    num_groups: int = field(default=0, metadata=_declare_key(TomlTable.take_positive_count, is_option=True))
    layout: str | None = field(default=None, metadata=_declare_key(_read_one_of(LAYOUTS), is_option=True))
    seed: int = 0
    adaptive: bool = field(default=False, metadata=_declare_key(TomlTable.take_flag))
    weight_offset: int = field(
        default=0, metadata=_declare_key(partial(TomlTable.take_positive_count, most=1), is_option=True)
    )
    heads: bool = field(default=False, metadata=_declare_key(TomlTable.take_flag))
    residual_dtype: DType | None = field(default=None, metadata=_declare_key(_read_dtype(FLOATS)))
    out_dtype: DType | None = field(default=None, metadata=_declare_key(_read_dtype(tuple(DType)), is_option=True))
    norms: int = field(default=0, metadata=_declare_key(partial(TomlTable.take_positive_count, most=MOST_NORMS)))
    negative_slope: float = field(
        default=DEFAULT_SLOPE, metadata=_declare_key(TomlTable.take_number, is_option=True)
    )
    parts: int = field(default=0, metadata=_declare_key(partial(TomlTable.take_positive_count, most=MOST_PARTS)))

    @classmethod
    def from_table(cls, table: TomlTable) -> Self:
        """Make a case from its keys in a scenario's table.  A field without a key has its default.

        Raises:
            ScenarioError: a key is missing, or its value is not one of the allowed.
        """
        keys = [each for each in fields(cls) if each.metadata]
        given = [each for each in keys if table.has_key(each.name) or each.default is MISSING]
        return cls(**{each.name: each.metadata["read"](table, each.name) for each in given})

    @property
    def op(self) -> str:
        """The operation without its direction."""
        return self.operation.removesuffix("/backward")

    @property
    def is_backward(self) -> bool:
        """Whether the operation computes gradients."""
        return self.operation.endswith("/backward")

    @property
    def is_gated(self) -> bool:
        """Whether the request has a gate."""
        return self.adaptive and self.residual and self.op != "group_norm"

    @property
    def channel_axis(self) -> int:
        """The axis of x whose size weight and bias have: 1, or -1 for the last."""
        layout = self.layout or ("nchw" if self.op == "group_norm" else "nhwc")
        return 1 if layout == "nchw" else -1

    def make_nondefault_client_options(self) -> dict[str, str | int]:
        """Return the options that differ from their defaults, as keyword arguments of the client's methods."""
        options = [each for each in fields(self) if each.metadata.get("is_option")]
        given = {
            each.name: getattr(self, each.name) for each in options if getattr(self, each.name) != each.default
        }
        return {name: value.value if isinstance(value, DType) else value for name, value in given.items()}

    def make_tensors(self) -> dict[str, HostTensor]:
        """Make the request's tensors by name; each call makes new tensors with the same values.

        Weight and bias follow from the seed and the size of the normalised axis alone, so that a server
        that holds them can be used with any number of rows.
        """
        numbers, parameters = np.random.default_rng(self.seed), np.random.default_rng([self.seed, 1])
        size = self.shape[-2:] if self.heads else (self.shape[self.channel_axis],)
        parameter_dtype = DType.FLOAT32 if self.seed % 2 else self.dtype
        offset, scale = numbers.uniform(-2, 2), numbers.uniform(0.5, 2)
        tensors = {"x": round_to_tensor(numbers.normal(offset, scale, self.shape), self.dtype)}
        if self.is_backward:
            tensors["dy"] = round_to_tensor(numbers.normal(0, 1, self.shape), self.dtype)
        if self.residual:
            tensors["residual"] = round_to_tensor(
                numbers.normal(0, 1, self.shape), self.residual_dtype or self.dtype
            )
        for norm in range(self.norms):
            tensors[f"weight.{norm}"] = round_to_tensor(parameters.normal(1, 0.3, size), parameter_dtype)
            tensors[f"bias.{norm}"] = round_to_tensor(parameters.normal(0, 0.3, size), parameter_dtype)
        if self.affine and not self.norms:
            tensors["weight"] = round_to_tensor(
                parameters.normal(1 - self.weight_offset, 0.3, size), parameter_dtype
            )
            if self.op != "rms_norm":
                tensors["bias"] = round_to_tensor(parameters.normal(0, 0.3, size), parameter_dtype)
        if self.adaptive:
            for name in ("scale", "shift", "gate") if self.is_gated else ("scale", "shift"):
                tensors[name] = round_to_tensor(numbers.normal(0, 0.3, (self.shape[0], *size)), parameter_dtype)
        return tensors
