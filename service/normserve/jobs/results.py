"""Dtype and shape of what an operation gives back."""

from collections.abc import Mapping
from typing import Protocol

from normserve.jobs.job import NormSpec, Op, Pass
from normserve.memory.host_tensors import DType

Described = Mapping[str, tuple[DType, tuple[int, ...]]]
"""Tensors by their names in the API."""

PARAMETERS = ("weight", "bias")
"""Tensors that belong to the whole launch; everything else is rows or samples of it."""

OF_SAMPLES = ("scale", "shift")
STATISTICS = ("mean", "rstd")


class Registered(Protocol):
    """What is asked here of a registered layer."""

    @property
    def size(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def has_bias(self) -> bool: ...


def results_of(
    spec: NormSpec, given: Described, layer: Registered | None
) -> dict[str, tuple[DType, tuple[int, ...]]]:
    """What comes of these tensors, in payload order.

    Args:
        given: x as [..., N], or GroupNorm's in either layout, and what else came.
        layer: whose parameters are used, if any.
    """
    like_x = given["x"]
    dtype, shape = like_x
    if spec.direction is Pass.BACKWARD:
        gradients = {f"d{name}": given[name] for name in (*PARAMETERS, *OF_SAMPLES) if name in given}
        if layer is not None:
            names = PARAMETERS if layer.has_bias else PARAMETERS[:1]
            gradients |= {f"d{name}": (layer.dtype, (layer.size,)) for name in names}
        return {"dx": like_x, **gradients}
    results = {"y": (spec.out_dtype or dtype, shape)}
    if "residual" in given:
        results["residual_out"] = like_x
    if spec.stats:
        of_units = (shape[0], spec.num_groups) if spec.op is Op.GROUP_NORM else shape[:-1]
        names = STATISTICS[1:] if spec.op is Op.RMS_NORM else STATISTICS
        results |= dict.fromkeys(names, (DType.FLOAT32, of_units))
    return results
