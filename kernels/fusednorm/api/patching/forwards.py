"""What `patch` puts in the place of a norm's `forward`.

An attribute of the instance is not bound to it, so each holds its module: weakly, for with a cycle of references a
model's memory would wait for the garbage collector.  A deep copy holds the copied module, an unpickled one the
unpickled.  A call that the kernels do not take goes to the forward of the module's class.
"""

from types import CodeType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusednorm.api.autograd import group_norm, layer_norm, rms_norm
from fusednorm.api.normalized_shape import machine_epsilon, one_axis, rows_of
from fusednorm.checks import FLOAT_DTYPES, as_heads, has_common_stride
from fusednorm.errors import KernelInputError
from fusednorm.layouts import in_layout

AUTOCASTS_RMS_NORM = bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"))
"""Whether CUDA's autocast knows rms_norm, as newer versions of torch have it."""

_any_autocast = torch._C._is_any_autocast_enabled

_MAX_COLS_OF_HEADS = 8192


class PatchedForward:
    """Stands as `forward` in a module's instance; call it as the forward of the module's class.

    Args:
        module: whose forward it is.
        input_name: of the tensor that is normalised, among that forward's parameters.
    """

    is_traced = False
    """Whether compilers see the library's operator, not the forward of the module's class.

    What they make of a LayerNorm or an RMSNorm they fuse with what stands around it: a compiled step with ours was
    0.99 to 1.34 of its time.  GroupNorm reads its samples twice there: with ours a step took 0.69 to 0.96.
    """

    def __init__(self, module: nn.Module, input_name: str) -> None:
        self._module = ref(module)
        self.input_name = input_name

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The forward of the module's class, computed by the kernels where they take x."""
        # Not the property: it costs a call for each of a model's norms.
        module = self._module()
        if module is None:
            module = self.module
        x = inputs[0] if len(inputs) == 1 and not named else self._only_input(inputs, named)
        kind = type(x)
        is_known = kind is Tensor or kind is Parameter or is_plain(x)
        is_taken = is_known and x.dtype in FLOAT_DTYPES and (x.is_cuda or x.is_cpu)
        if is_taken and (self.is_traced or not is_compiling()):
            try:
                return self.compute(module, x)
            except KernelInputError:
                pass
        return type(module).forward(module, *inputs, **named)

    def compute(self, module: nn.Module, x: Tensor) -> Tensor:
        """The module's y of a float32, float16 or bfloat16 x.

        Raises:
            KernelInputError: the kernels do not take the call.
        """
        raise NotImplementedError

    @property
    def module(self) -> nn.Module:
        """Whose forward it is.

        Raises:
            ReferenceError: it is gone.
        """
        module = self._module()
        if module is None:
            raise ReferenceError("the module that was patched is gone: copy patched modules by copy.deepcopy")
        return module

    @property
    def __wrapped__(self) -> MethodType:
        """The forward that it stands for, whose signature `inspect` shows."""
        return MethodType(type(self.module).forward, self.module)

    @property
    def __code__(self) -> CodeType:
        """By which torch.export names the inputs of a module that it is given alone."""
        return self.__wrapped__.__func__.__code__

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _module=ref(state["_module"]))

    def _only_input(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The one argument that was given, if by its name; None if there were others."""
        return None if inputs or len(named) != 1 else named.get(self.input_name)


class LayerNormForward(PatchedForward):
    """torch.nn.LayerNorm's."""

    def compute(self, module: Any, x: Tensor) -> Tensor:
        weight, bias = _affine(module)
        shape = module.normalized_shape
        if _any_autocast() and casts_to_float32(x):
            x = x.float()
        if len(shape) == 1 and weight is not None:
            return layer_norm(x if x.is_contiguous() else _walkable(x), weight, bias, module.eps)
        # With one axis of several made one, or without a weight to tell by whether x fits.
        rows = rows_of(x, shape).contiguous()
        y = layer_norm(rows, one_axis("weight", weight, shape), one_axis("bias", bias, shape), module.eps)
        return y.view(x.shape)


class RMSNormForward(PatchedForward):
    """torch.nn.RMSNorm's."""

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
    """torch.nn.GroupNorm's."""

    is_traced = True

    def compute(
        self,
        module: Any,
        x: Tensor,
        activation: str = "none",
        scale: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> Tensor:
        """act(y * (1 + scale) + shift); the name of an activation and [N, C], as `group_norm` takes them."""
        weight, bias = _affine(module)
        if _any_autocast() and casts_to_float32(x):
            x = x.float()
        if not (x.is_contiguous() or _is_of_images(x) or in_layout(x, True)):
            x = x.contiguous()
        groups, eps = module.num_groups, module.eps
        return group_norm(x, groups, weight, bias, eps, scale=scale, shift=shift, activation=activation)


Dtypes = dict[tuple[torch.dtype, torch.dtype], torch.dtype]
"""The dtype of y by those of x and weight."""


class ObservedRMSNormForward(PatchedForward):
    """That of an RMSNorm whose formula was found by its results.

    Args:
        module, input_name: as for every other.
        eps_name: the module's attribute that is added to the mean square.
        weight_offset: 0, or 1 for a weight that is kept around zero.
        dtypes: what the module returns; autocast_dtypes: the same under CUDA's autocast.
    """

    def __init__(
        self,
        module: nn.Module,
        input_name: str,
        eps_name: str,
        weight_offset: float,
        dtypes: Dtypes,
        autocast_dtypes: Dtypes,
    ) -> None:
        super().__init__(module, input_name)
        self.eps_name = eps_name
        self.weight_offset = weight_offset
        self.dtypes = dtypes
        self.autocast_dtypes = autocast_dtypes

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


def may_be_taken(x: Any) -> bool:
    """Whether an argument is a tensor of a kind, dtype and device that there are kernels for."""
    return is_plain(x) and x.dtype in FLOAT_DTYPES and (x.is_cuda or x.is_cpu)


def is_plain(x: Any) -> bool:
    """Whether a value is a tensor, and none that consists of others, as DTensor does."""
    kind = type(x)
    if kind is Tensor or kind is Parameter:
        return True
    return isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x)


def _weight(module: Any) -> Tensor | None:
    """A module's weight as it is at this call.

    Raises:
        KernelInputError: it has become a tensor of another kind since the module was patched.
    """
    parameters = module._parameters
    # A module's own look-up of an attribute takes as long as all else here; parametrised modules need it.
    weight: Tensor | None = parameters["weight"] if "weight" in parameters else module.weight  # noqa: SIM401
    if type(weight) is not Parameter and weight is not None and not is_plain(weight):
        raise KernelInputError(f"weight must be a plain tensor, got {type(weight).__name__}")
    return weight


def _affine(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias, as `_weight` has the one."""
    parameters = module._parameters
    bias: Tensor | None = parameters["bias"] if "bias" in parameters else module.bias  # noqa: SIM401
    if type(bias) is not Parameter and bias is not None and not is_plain(bias):
        raise KernelInputError(f"bias must be a plain tensor, got {type(bias).__name__}")
    return _weight(module), bias


def casts_to_float32(x: Tensor) -> bool:
    """Whether autocast computes norms of x in float32 and returns that: CUDA's does, the CPU's does not."""
    return x.is_cuda and torch.is_autocast_enabled("cuda")


def _is_of_images(x: Tensor) -> bool:
    """Whether x is channels-last [N, C, H, W], as torch sees without a view."""
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


def _walkable(x: Tensor) -> Tensor:
    """x [..., cols] as the kernels take it, which need a copy for some strides."""
    # How views succeed is not for Dynamo to see.
    if not is_compiling() and x.stride(-1) == 1 and (has_common_stride(x) or _has_common_tokens(x)):
        return x
    return x.contiguous()


def _has_common_tokens(x: Tensor) -> bool:
    """Whether both passes take x [..., heads, cols], whose rows no single stride reaches."""
    if x.shape[-1] > _MAX_COLS_OF_HEADS:
        return False
    try:
        as_heads("x", x)
    except KernelInputError:
        return False
    return True
