"""The names of activations and of the operations' tensors in the API, for the server and its clients."""

from collections.abc import Iterable
from typing import Literal, get_args

ActivationName = Literal["none", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh"]
"""The name of an activation; gelu is by erf, gelu_tanh by tanh."""

ACTIVATIONS: tuple[str, ...] = get_args(ActivationName)

DEFAULT_SLOPE = 0.01
"""The default of `negative_slope`, and the only value that other activations than leaky_relu take."""

PARAMETERS = ("weight", "bias")
"""Tensors that belong to a launch; all other tensors are divided by rows or samples."""

PARAMETER_GRADIENTS = tuple([f"d{name}" for name in PARAMETERS])
"""Results that are sums over all rows or samples."""

OF_SAMPLES = ("scale", "shift", "gate")
"""Tensors with a row for each sample: consecutive rows of LayerNorm and RMSNorm, or GroupNorm's, without gate."""

SAMPLE_GRADIENTS = tuple([f"d{name}" for name in OF_SAMPLES])
"""Results with a row for each sample."""

STATISTICS = ("mean", "rstd")

COMPANIONS = ("residual", "dy", "dresidual_out")
"""Tensors of x's shape."""

OF_ROWS = frozenset(["x", *COMPANIONS, *STATISTICS, *OF_SAMPLES])
"""Tensors that belong to rows or samples; a request with several x has as many of each."""

MAX_NORMS = 8
"""The most norms of a chain, a limit of the kernels."""

CHAIN_PARAMETERS = tuple([f"{name}.{norm}" for norm in range(MAX_NORMS) for name in PARAMETERS])
"""Names of a chain's parameters; each norm may have both, either or none."""


def is_parameter(name: str) -> bool:
    """Return whether a tensor belongs to a launch: a weight or a bias, in a chain `weight.0` and so on."""
    return name.partition(".")[0] in PARAMETERS


def count_norms(names: Iterable[str]) -> int:
    """Return the number of norms of a chain with these tensors: one more than the last one with a parameter."""
    return max([1 + int(name.partition(".")[2]) for name in names if name in CHAIN_PARAMETERS], default=0)
