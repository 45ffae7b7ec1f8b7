"""Replacements for the forward of a norm: functions of the kernels with the signature of its class's forward."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import Parameter

from fusednorm.api.autograd import group_norm, layer_norm, rms_norm
from fusednorm.api.normalized_shape import machine_epsilon, one_axis, rows_of
from fusednorm.api.patching.autocast import AUTOCASTS_RMS_NORM, casts_to_float32
from fusednorm.api.patching.patched import PatchedForward, Replacement, is_plain
from fusednorm.api.patching.recognise import Observed, input_name, recognise_norm
from fusednorm.arguments.checks import as_heads, has_common_stride
from fusednorm.arguments.layouts import in_layout
from fusednorm.errors import KernelInputError

_any_autocast = torch._C._is_any_autocast_enabled

_MAX_COLS_OF_HEADS = 8192


class LayerNormForward(PatchedForward):
    """The forward of torch.nn.LayerNorm."""

    def compute(self, module: Any, x: Tensor) -> Tensor:
        weight, bias = _affine(module)
        shape = module.normalized_shape
        if _any_autocast() and casts_to_float32(x):
            x = x.float()
        if len(shape) == 1 and weight is not None:
            return layer_norm(x if x.is_contiguous() else _walkable(x), weight, bias, module.eps)
        # Several axes are joined into one, or there is no weight against which x could be checked.
        rows = rows_of(x, shape).contiguous()
        y = layer_norm(rows, one_axis("weight", weight, shape), one_axis("bias", bias, shape), module.eps)
        return y.view(x.shape)


class RMSNormForward(PatchedForward):
    """The forward of torch.nn.RMSNorm."""

    def compute(self, module: Any, x: Tensor) -> Tensor:
        weight, shape, eps = _weight(module), module.normalized_shape, module.eps
        if AUTOCASTS_RMS_NORM and _any_autocast() and casts_to_float32(x):
            x = x.float()
        if eps is None:
            eps = machine_epsilon(x)
        if len(shape) == 1 and weight is not None:
            return rms_norm(x if x.is_contiguous() else _walkable(x), weight, eps)
        y = rms_norm(rows_of(x, shape).contiguous(), one_axis("weight", weight, shape), eps)
        return y.view(x.shape)


class GroupNormForward(PatchedForward):
    """The forward of torch.nn.GroupNorm."""

    is_traced = True
    takes_activation = True

    def compute(
        self,
        module: Any,
        x: Tensor,
        activation: str = "none",
        scale: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> Tensor:
        """act(y * (1 + scale) + shift), with the arguments `activation`, `scale` and `shift` of `group_norm`."""
        weight, bias = _affine(module)
        if _any_autocast() and casts_to_float32(x):
            x = x.float()
        if not (x.is_contiguous() or _is_of_images(x) or in_layout(x, True)):
            x = x.contiguous()
        groups, eps = module.num_groups, module.eps
        return group_norm(x, groups, weight, bias, eps, scale=scale, shift=shift, activation=activation)


class ObservedRMSNormForward(PatchedForward):
    """The forward of an RMSNorm whose formula was determined from its results.

    Args:
        module, input_name: as in `PatchedForward`.
        observed: the properties that the results showed.
    """

    def __init__(self, module: nn.Module, input_name: str, observed: Observed) -> None:
        super().__init__(module, input_name)
        self.eps_name = observed.eps_name
        self.weight_offset = observed.weight_offset
        self.dtypes = observed.dtypes
        self.autocast_dtypes = observed.autocast_dtypes

    def compute(self, module: nn.Module, x: Tensor) -> Tensor:
        weight = _weight(module)
        if weight is None:
            raise KernelInputError("weight must be a tensor, got None")
        is_cast = _any_autocast() and casts_to_float32(x)
        dtype = (self.autocast_dtypes if is_cast else self.dtypes).get((x.dtype, weight.dtype))
        if dtype is None:
            raise KernelInputError(f"weight must be float32, float16 or bfloat16, got {weight.dtype}")
        # So that y is rounded once.
        if dtype is not x.dtype:
            x = x.float()
        eps = getattr(module, self.eps_name)
        y = rms_norm(x if x.is_contiguous() else _walkable(x), weight, eps, weight_offset=self.weight_offset)
        return y if y.dtype is dtype else y.to(dtype)


_OF_OPERATIONS: dict[str, type[PatchedForward]] = {
    "layer_norm": LayerNormForward,
    "rms_norm": RMSNormForward,
    "group_norm": GroupNormForward,
}


def replace_norm(module: nn.Module) -> Replacement | None:
    """The replacement for the forward of a norm; None for a module that does not look like a norm.

    Raises:
        NotRecognisedError: the module must not be patched.
    """
    norm = recognise_norm(module)
    if norm is None:
        return None
    name = input_name(module)
    if norm.observed is not None:
        return Replacement(norm.description, ObservedRMSNormForward(module, name, norm.observed))
    return Replacement(norm.description, _OF_OPERATIONS[norm.operation](module, name))


def _weight(module: Any) -> Tensor | None:
    """A module's current weight.

    Raises:
        KernelInputError: the weight has been replaced by a tensor of another kind since the module was patched.
    """
    parameters = module._parameters
    # A module's own look-up of an attribute takes as long as all else here; parametrised modules need it.
    weight: Tensor | None = parameters["weight"] if "weight" in parameters else module.weight  # noqa: SIM401
    if type(weight) is not Parameter and weight is not None and not is_plain(weight):
        raise KernelInputError(f"weight must be a plain tensor, got {type(weight).__name__}")
    return weight


def _affine(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """A module's current weight and bias, checked as in `_weight`."""
    parameters = module._parameters
    bias: Tensor | None = parameters["bias"] if "bias" in parameters else module.bias  # noqa: SIM401
    if type(bias) is not Parameter and bias is not None and not is_plain(bias):
        raise KernelInputError(f"bias must be a plain tensor, got {type(bias).__name__}")
    return _weight(module), bias


def _is_of_images(x: Tensor) -> bool:
    """Whether x is channels-last [N, C, H, W], which torch determines without a view."""
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


def _walkable(x: Tensor) -> Tensor:
    """x [..., cols] with strides that the kernels support; a copy for other strides."""
    # Dynamo must not trace whether views succeed.
    if not is_compiling() and x.stride(-1) == 1 and (has_common_stride(x) or _has_common_tokens(x)):
        return x
    return x.contiguous()


def _has_common_tokens(x: Tensor) -> bool:
    """Whether both passes support x [..., heads, cols], whose rows are not one constant stride apart."""
    if x.shape[-1] > _MAX_COLS_OF_HEADS:
        return False
    try:
        as_heads("x", x)
    except KernelInputError:
        return False
    return True
