"""Dtypes and shapes of an operation's results."""

from collections.abc import Mapping
from typing import Protocol

from normserve.codec.api_names import OF_SAMPLES, PARAMETERS, STATISTICS
from normserve.jobs.job import NormSpec, Op, PassDirection
from normserve.memory.tensors import DType

Described = Mapping[str, tuple[DType, tuple[int, ...]]]
"""Dtypes and shapes of tensors, by the tensors' names in the API."""


class LayerParameterSpec(Protocol):
    """The properties of a registered layer that determine the dtypes and shapes of an operation's results."""

    @property
    def size(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def has_bias(self) -> bool: ...
    @property
    def heads(self) -> int: ...


def has_own_residual_gradient(op: Op, given: Described) -> bool:
    """Return whether the gradient of the residual is not dx: with a gate, or a type other than x's; never for
    GroupNorm.
    """
    if op is Op.GROUP_NORM or "residual" not in given:
        return False
    return "gate" in given or given["residual"][0] is not given["x"][0]


def compute_statistics_shape(spec: NormSpec, x_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Compute the shape of mean and rstd: a value for each group of a sample, each position of one, or each row."""
    if spec.op is Op.GROUP_NORM:
        return (x_shape[0], spec.num_groups)
    return x_shape[:-1] if spec.layout is None else (x_shape[0], *x_shape[2:])


def infer_result_specs(
    spec: NormSpec, given: Described, layer: LayerParameterSpec | None
) -> dict[str, tuple[DType, tuple[int, ...]]]:
    """Infer the dtype and shape of each result of an operation on the given tensors, by the results' names.

    The axes of the results are in the order of x's axes.

    Args:
        given: x as [..., N], or samples in the spec's layout, and the other input tensors.
        layer: whose parameters are used, if any.
    """
    like_x = given["x"]
    dtype, shape = like_x
    if spec.direction is PassDirection.BACKWARD:
        gradients = {f"d{name}": given[name] for name in (*PARAMETERS, *OF_SAMPLES) if name in given}
        if layer is not None:
            names = PARAMETERS if layer.has_bias else PARAMETERS[:1]
            shape = (layer.heads, layer.size) if layer.heads else (layer.size,)
            gradients |= {f"d{name}": (layer.dtype, shape) for name in names}
        if has_own_residual_gradient(spec.op, given):
            return {"dx": like_x, "dresidual": given["residual"], **gradients}
        return {"dx": like_x, **gradients}
    results = {"y": (spec.out_dtype or dtype, shape)}
    if "residual" in given:
        results["residual_out"] = like_x if spec.op is Op.GROUP_NORM else given["residual"]
    if spec.stats:
        names = STATISTICS[1:] if spec.op is Op.RMS_NORM else STATISTICS
        results |= dict.fromkeys(names, (DType.FLOAT32, compute_statistics_shape(spec, shape)))
    if spec.out_dtype is DType.FLOAT8_E4M3FN:
        results["scale"] = (DType.FLOAT32, shape[:-1])
    return results
