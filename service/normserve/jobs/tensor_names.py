"""The names of the operations' tensors in the API."""

from collections.abc import Iterable

PARAMETERS = ("weight", "bias")
"""Tensors that belong to the whole launch; everything else is rows or samples of it."""

OF_SAMPLES = ("scale", "shift")
STATISTICS = ("mean", "rstd")

MAX_NORMS = 8
"""In a chain, as the kernels take them."""

CHAIN_PARAMETERS = tuple([f"{name}.{norm}" for norm in range(MAX_NORMS) for name in PARAMETERS])
"""Of its norms, each of which may have both, either or none."""


def is_parameter(name: str) -> bool:
    """Whether a tensor belongs to the whole launch: a weight or a bias, in a chain `weight.0` and so on."""
    return name.partition(".")[0] in PARAMETERS


def norm_count(names: Iterable[str]) -> int:
    """How many norms a chain has that takes these tensors: one more than the last that has a parameter."""
    return max([1 + int(name.partition(".")[2]) for name in names if name in CHAIN_PARAMETERS], default=0)
