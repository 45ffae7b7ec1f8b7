"""Replacements for the forward of a norm: functions of the kernels with the signature of its class's forward."""

from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from fusednorm.api.autograd import rms_norm
from fusednorm.api.module_norms import (
    casts_to_float32,
    compute_group_norm_module,
    compute_layer_norm_over_shape,
    compute_rms_norm_module,
)
from fusednorm.api.patching.norm_recognition import ProbedProperties, get_input_name, recognise_norm
from fusednorm.api.patching.patched_forward import ForwardReplacement, PatchedForward, is_unwrapped_tensor
from fusednorm.errors import KernelInputError


class LayerNormForward(PatchedForward):
    """Replacement for the forward of a torch.nn.LayerNorm, by the functions of this library."""

    def compute(self, module: Any, x: Tensor) -> Tensor:
        return compute_layer_norm_over_shape(x, module.normalized_shape, *_get_weight_and_bias(module), module.eps)


class RMSNormForward(PatchedForward):
    """Replacement for the forward of a torch.nn.RMSNorm, by the functions of this library."""

    def compute(self, module: Any, x: Tensor) -> Tensor:
        return compute_rms_norm_module(x, module.normalized_shape, _get_weight(module), module.eps)


class GroupNormForward(PatchedForward):
    """Replacement for the forward of a torch.nn.GroupNorm, by the functions of this library."""

    traces_operator = True
    can_fuse_activation = True

    def compute(self, module: Any, x: Tensor, **others: Any) -> Tensor:
        """Compute the module's y, with other arguments of `group_norm`."""
        return compute_group_norm_module(x, module.num_groups, *_get_weight_and_bias(module), module.eps, **others)


class ProbedRMSNormForward(PatchedForward):
    """Replacement for the forward of an RMSNorm class whose formula was determined from its results.

    Args:
        module, input_name: as in `PatchedForward`.
        observed: the properties that the results showed.
    """

    def __init__(self, module: nn.Module, input_name: str, observed: ProbedProperties) -> None:
        super().__init__(module, input_name)
        self.eps_name = observed.eps_name
        self.weight_offset = observed.weight_offset
        self.dtypes = observed.result_dtypes
        self.autocast_dtypes = observed.autocast_dtypes

    def compute(self, module: nn.Module, x: Tensor) -> Tensor:
        """Compute the module's y in the dtype that the forward of its class returned when it was probed.

        Raises:
            KernelInputError: there is no weight, or the forward of the class rejected the dtypes of x and
                weight.
        """
        weight = _get_weight(module)
        if weight is None:
            raise KernelInputError("weight must be a tensor, got None")
        dtype = (self.autocast_dtypes if casts_to_float32(x) else self.dtypes).get((x.dtype, weight.dtype))
        if dtype is None:
            raise KernelInputError(f"weight must be float32, float16 or bfloat16, got {weight.dtype}")
        # So that y is rounded once.
        if dtype is not x.dtype:
            x = x.float()
        eps = getattr(module, self.eps_name)
        y = rms_norm(x, weight, eps, weight_offset=self.weight_offset)
        return y if y.dtype is dtype else y.to(dtype)


_OF_OPERATIONS: dict[str, type[PatchedForward]] = {
    "layer_norm": LayerNormForward,
    "rms_norm": RMSNormForward,
    "group_norm": GroupNormForward,
}


def find_norm_replacement(module: nn.Module) -> ForwardReplacement | None:
    """Make the replacement for a norm's forward; None for a module that does not look like a norm.

    Raises:
        UnpatchableModuleError: the module must not be patched.
    """
    norm = recognise_norm(module)
    if norm is None:
        return None
    name = get_input_name(module)
    if norm.probed is not None:
        return ForwardReplacement(norm.description, ProbedRMSNormForward(module, name, norm.probed))
    return ForwardReplacement(norm.description, _OF_OPERATIONS[norm.operation](module, name))


def _get_weight(module: Any) -> Tensor | None:
    """Return a module's current weight, which must be None or a plain tensor.

    Raises:
        KernelInputError: the weight has been replaced by a tensor of another kind since the module was patched.
    """
    parameters = module._parameters
    # A module's own look-up of an attribute takes as long as all else here; parametrised modules need it.
    weight: Tensor | None = parameters["weight"] if "weight" in parameters else module.weight  # noqa: SIM401
    if type(weight) is not Parameter and weight is not None and not is_unwrapped_tensor(weight):
        raise KernelInputError(f"weight must be a plain tensor, got {type(weight).__name__}")
    return weight


def _get_weight_and_bias(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return a module's current weight and bias, which must each be None or a plain tensor.

    Raises:
        KernelInputError: one of them is a tensor that consists of other tensors, such as a DTensor.
    """
    parameters = module._parameters
    bias: Tensor | None = parameters["bias"] if "bias" in parameters else module.bias  # noqa: SIM401
    if type(bias) is not Parameter and bias is not None and not is_unwrapped_tensor(bias):
        raise KernelInputError(f"bias must be a plain tensor, got {type(bias).__name__}")
    return _get_weight(module), bias
