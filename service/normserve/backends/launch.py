"""From a spec and its tensors to a call of the kernel library, whichever library that is."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from fusednorm.results import Backward, Forward
from torch import Tensor

from normserve.backends.tensors import TORCH_DTYPES
from normserve.jobs import NormSpec, Op, Pass


@dataclass(frozen=True, slots=True)
class ResidentParameters:
    """A registered layer's parameters where kernels read them."""

    weight: Tensor
    bias: Tensor | None


def parameters_of(resident: object) -> dict[str, Tensor]:
    """A layer's parameters by the names of the API."""
    assert isinstance(resident, ResidentParameters)
    parameters = {"weight": resident.weight}
    return parameters if resident.bias is None else parameters | {"bias": resident.bias}


def launch(
    library: ModuleType,
    spec: NormSpec,
    tensors: Mapping[str, Tensor],
    of_library: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Run one operation.

    Args:
        library: has the functions of `fusednorm`, on the tensors' device.
        tensors: by their names in the API; GroupNorm's as [B, C, *spatial].

        of_library: further arguments that this library's function takes.

    Returns:
        What the operation gives back, by the names of the API.
    """
    x, residual = tensors["x"], tensors.get("residual")
    if not x.numel():
        return _empty(spec, tensors)
    if residual is not None and residual.dtype != x.dtype:
        # The library's sum has the residual's dtype, the API's has x's: from float32 it is rounded once, below.
        tensors = {**tensors, "residual": residual.float()}
    result: Forward | Backward = call_of(library, spec, tensors, of_library)()
    outputs = {name: tensor for name, tensor in result._asdict().items() if tensor is not None}
    if "residual_out" in outputs:
        outputs["residual_out"] = outputs["residual_out"].to(x.dtype)
    # The API's dx is the gradient of x and of residual alike.
    outputs.pop("dresidual", None)
    return outputs


def call_of(
    library: ModuleType, spec: NormSpec, tensors: Mapping[str, Tensor], of_library: Mapping[str, Any]
) -> functools.partial[Forward | Backward]:
    """The call of the library's function that an operation is, on tensors that need no conversion."""
    function = getattr(library, f"{spec.op.value}_{spec.direction.value}")
    leading = [tensors["x"], *([spec.num_groups] if spec.op is Op.GROUP_NORM else [])]
    options: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name not in ("x", "dy")}
    options |= {"eps": spec.eps, "activation": spec.activation, "dropout": spec.dropout, "seed": spec.seed}
    if spec.direction is Pass.FORWARD:
        options["out_dtype"] = None if spec.out_dtype is None else TORCH_DTYPES[spec.out_dtype]
        options["stats"] = spec.stats
    else:
        leading.insert(0, tensors["dy"])
    options |= of_library
    return functools.partial(function, *leading, **options)


def _empty(spec: NormSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What comes of no rows at all: empty tensors, and sums of nothing."""
    x = tensors["x"]
    if spec.direction is Pass.BACKWARD:
        sums = [name for name in ("weight", "bias", "scale", "shift") if name in tensors]
        return {"dx": torch.empty_like(x), **{f"d{name}": torch.zeros_like(tensors[name]) for name in sums}}
    outputs = {"y": torch.empty_like(x, dtype=None if spec.out_dtype is None else TORCH_DTYPES[spec.out_dtype])}
    if "residual" in tensors:
        outputs["residual_out"] = torch.empty_like(x)
    if spec.stats:
        shape = (0, spec.num_groups) if spec.op is Op.GROUP_NORM else (0,)
        for name in ("rstd",) if spec.op is Op.RMS_NORM else ("mean", "rstd"):
            outputs[name] = x.new_empty(shape, dtype=torch.float32)
    return outputs
