"""Replacements for the forward of a norm: functions of the kernels with the signature of its class's forward."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fusednorm.api.instance_norm import instance_norm
from fusednorm.api.module_norms import (
    casts_to_float32,
    compute_group_norm_module,
    compute_layer_norm_over_shape,
    compute_rms_norm_module,
)
from fusednorm.api.patching.activation_modules import ActivationOptions, find_inner_activation, has_hooks
from fusednorm.api.patching.norm_recognition import ProbedNorm, get_input_name, recognise_norm
from fusednorm.api.patching.patched_forward import (
    ForwardReplacement,
    PatchedForward,
    is_unwrapped_tensor,
    promote_with_modulation,
    widen_to_modulation,
)
from fusednorm.errors import KernelInputError
from fusednorm.tensors.layouts import convert_to_layout


class LayerNormForward(PatchedForward):
    """Replacement for the forward of a torch.nn.LayerNorm, by the functions of this library."""

    operation = "layer_norm"
    can_fuse_activation = True
    can_modulate = True

    def compute(
        self, module: Any, x: Tensor, *, scale: Tensor | None = None, shift: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Compute the module's y, with other arguments of `layer_norm`."""
        if scale is not None or shift is not None:
            x = widen_to_modulation(x, scale=scale, shift=shift)
        weight, bias = _get_parameter(module, "weight"), _get_parameter(module, "bias")
        return compute_layer_norm_over_shape(
            x, module.normalized_shape, weight, bias, module.eps, scale=scale, shift=shift, **others
        )


class RMSNormForward(PatchedForward):
    """Replacement for the forward of a torch.nn.RMSNorm, by the functions of this library."""

    operation = "rms_norm"
    can_fuse_activation = True
    can_modulate = True

    def compute(
        self, module: Any, x: Tensor, *, scale: Tensor | None = None, shift: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Compute the module's y, with other arguments of `rms_norm`."""
        if scale is not None or shift is not None:
            x = widen_to_modulation(x, scale=scale, shift=shift)
        weight = _get_parameter(module, "weight")
        return compute_rms_norm_module(
            x, module.normalized_shape, weight, module.eps, scale=scale, shift=shift, **others
        )


class GroupNormForward(PatchedForward):
    """Replacement for the forward of a torch.nn.GroupNorm, by the functions of this library."""

    operation = "group_norm"
    traces_operator = True
    can_fuse_activation = True

    def compute(self, module: Any, x: Tensor, **others: Any) -> Tensor:
        """Compute the module's y, with other arguments of `group_norm`."""
        weight, bias = _get_parameter(module, "weight"), _get_parameter(module, "bias")
        return compute_group_norm_module(x, module.num_groups, weight, bias, module.eps, **others)


class InstanceNormForward(PatchedForward):
    """Replacement for the forward of a torch.nn.InstanceNorm1d to 3d, by the functions of this library."""

    operation = "instance_norm"
    traces_operator = True
    can_fuse_activation = True

    def compute(self, module: Any, x: Tensor, **others: Any) -> Tensor:
        """Compute the module's y for x with or without a batch, with other arguments of `instance_norm`.

        Unlike torch's other norms, InstanceNorm has the dtype of x under autocast, too.

        Raises:
            KernelInputError: also if the class raises an error or warns, which the caller leaves to it.
        """
        unbatched = module._get_no_batch_dim()
        if x.dim() == unbatched:
            return self.compute(module, x.unsqueeze(0), **others).squeeze(0)
        if x.dim() != unbatched + 1 or x.shape[1] != module.num_features:
            raise KernelInputError(f"x must have {module.num_features} channels, got {list(x.shape)}")
        if x.numel() <= x.shape[0] * x.shape[1]:
            raise KernelInputError(f"x must have several values for each channel, got {list(x.shape)}")
        weight, bias = _get_parameter(module, "weight"), _get_parameter(module, "bias")
        return instance_norm(x, weight, bias, module.eps, **others)


class ProbedNormForward(PatchedForward):
    """Replacement for the forward of a norm whose formula was determined from its results.

    Args:
        module, input_name: as in `PatchedForward`.
        probed: the properties that the results showed.
    """

    def __init__(self, module: nn.Module, input_name: str, probed: ProbedNorm) -> None:
        super().__init__(module, input_name)
        self.probed = probed
        self.operation = probed.formula.operation
        self.can_fuse_activation = probed.formula.can_fuse_activation
        # The scale and shift of a group_norm are those of channels, not of rows.
        self.can_modulate = probed.formula.can_modulate and self.operation != "group_norm"

    def compute(
        self,
        module: nn.Module,
        x: Tensor,
        *,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Compute the module's y, with other arguments of the library's function if the formula leaves them free.

        The dtype of y is the one that the class would return.

        Raises:
            KernelInputError: the forward of the class rejected the dtypes of x and parameters, or the module or x
                is no longer as it was when probed.
        """
        probed = self.probed
        formula = probed.formula
        if module._modules and not _has_activation(module, formula.activation):
            raise KernelInputError(f"the activation must be {formula.activation}, without hooks")
        axis = -1 if formula.layout is None else 1
        if x.dim() not in probed.ranks or (probed.width is not None and x.shape[axis] != probed.width):
            raise KernelInputError(f"x must have a shape like the samples, got {list(x.shape)}")
        weight = None if formula.weight_name is None else _get_parameter(module, formula.weight_name)
        bias = None if formula.bias_name is None else _get_parameter(module, formula.bias_name)
        dtype = self._find_result_dtype(x, weight, bias)
        if scale is not None or shift is not None:
            dtype = promote_with_modulation(dtype, scale, shift)
            options.update(scale=scale, shift=shift)
        # So that y is rounded once.
        if dtype is not x.dtype:
            x = x.float()
        if probed.returns_channels_last:
            # Else the convolutions that follow would get another memory format than from the class.
            x = convert_to_layout(x, True)
        eps = probed.eps if probed.eps_name is None else getattr(module, probed.eps_name)
        y = formula.compute(x, weight, bias, eps, **options)
        return y if y.dtype is dtype else y.to(dtype)

    def _find_result_dtype(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
        """Return the dtype that the forward of the class returned for the dtypes of x and the parameters.

        Raises:
            KernelInputError: the forward rejected them, or weight and bias are of two dtypes.
        """
        parameter = bias if weight is None else weight
        given = x.dtype if parameter is None else parameter.dtype
        table = self.probed.autocast_dtypes if casts_to_float32(x) else self.probed.result_dtypes
        dtype = table.get((x.dtype, given))
        if dtype is None or (bias is not None and bias.dtype is not given):
            raise KernelInputError(f"weight and bias must have one dtype that goes with {x.dtype}, got {given}")
        return dtype


class ProbedGroupNormForward(ProbedNormForward):
    """Replacement for the forward of a GroupNorm whose formula was determined from its results."""

    traces_operator = True


_OF_OPERATIONS: dict[str, type[PatchedForward]] = {
    each.operation: each for each in (LayerNormForward, RMSNormForward, GroupNormForward, InstanceNormForward)
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
        kind = ProbedGroupNormForward if norm.operation == "group_norm" else ProbedNormForward
        return ForwardReplacement(norm.description, kind(module, name, norm.probed))
    return ForwardReplacement(norm.description, _OF_OPERATIONS[norm.operation](module, name))


def _has_activation(module: nn.Module, activation: ActivationOptions) -> bool:
    """Return whether a norm's submodules still are the given activation or identities, without hooks."""
    return find_inner_activation(module) == activation and not any(map(has_hooks, module.children()))


def _get_parameter(module: Any, name: str) -> Tensor | None:
    """Return a module's current parameter, which must be None or a plain tensor.

    Raises:
        KernelInputError: the parameter is a tensor that consists of other tensors, such as a DTensor.
    """
    parameters = module._parameters
    # A module's own look-up of an attribute takes as long as all else here; parametrised modules need it.
    parameter: Tensor | None = parameters[name] if name in parameters else getattr(module, name)
    if type(parameter) is not Parameter and parameter is not None and not is_unwrapped_tensor(parameter):
        raise KernelInputError(f"{name} must be a plain tensor, got {type(parameter).__name__}")
    return parameter
