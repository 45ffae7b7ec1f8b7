"""The object that `patch` assigns to a norm's `forward`.

An attribute of the instance is not bound to it, so each object refers to its module.  The reference is weak: with
a reference cycle a model's memory would be freed only by the garbage collector.  After a deep copy it refers to
the copied module, after unpickling to the unpickled one.  A call that the kernels do not support goes to the
forward of the module's class.
"""

from types import CodeType, MethodType
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.jit import ScriptModule
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusednorm.errors import KernelInputError
from fusednorm.tensors.arrays import FLOAT_DTYPES


class PatchedForward:
    """A module's new `forward`; it calls this library where possible, else the forward of the module's class.

    It is an attribute of the instance.

    Args:
        module: the module whose forward it replaces.
        input_name: the name of that forward's parameter for the tensor that is normalised.
    """

    operation = ""
    """The name of the operation of a norm: layer_norm, rms_norm, group_norm or instance_norm."""

    traces_operator = False
    """Whether compilers trace the library's operator, not the forward of the module's class.

    Compilers fuse their own LayerNorm or RMSNorm with adjacent operations: a compiled step with this library's took
    0.99 to 1.34 of the time.  Their GroupNorm and InstanceNorm read their samples twice: a step with this library's
    GroupNorm took 0.69 to 0.96.
    """

    can_fuse_activation = False
    """Whether `compute` of a norm also takes an activation after it."""

    can_modulate = False
    """Whether `compute` of a norm of rows also takes scale and shift."""

    def __init__(self, module: nn.Module, input_name: str) -> None:
        self._module = ref(module)
        self.input_name = input_name

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Compute the forward of the module's class, by the kernels if they support x."""
        # Not the property, which would cost one more call for each norm of a model.
        module = self._module()
        if module is None:
            module = self.module
        if is_compiling() and not self.traces_operator:
            return type(module).forward(module, *inputs, **named)
        x = inputs[0] if len(inputs) == 1 and not named else self._get_only_input(inputs, named)
        kind = type(x)
        is_known = kind is Tensor or kind is Parameter or is_unwrapped_tensor(x)
        if is_known and x.dtype in FLOAT_DTYPES and (x.is_cuda or x.is_cpu):
            try:
                return self.compute(module, x)
            except KernelInputError:
                pass
        return type(module).forward(module, *inputs, **named)

    def compute(self, module: nn.Module, x: Tensor) -> Tensor:
        """Compute the module's y for a float32, float16 or bfloat16 x by this library.

        Subclasses with a `__call__` of their own, such as that of a Sequential, need not define it.

        Raises:
            KernelInputError: the kernels do not support the call.
        """
        raise NotImplementedError

    @property
    def module(self) -> nn.Module:
        """The module whose forward this object replaces.

        Raises:
            ReferenceError: the module no longer exists.
        """
        module = self._module()
        if module is None:
            raise ReferenceError("the patched module no longer exists: copy patched modules by copy.deepcopy")
        return module

    @property
    def __wrapped__(self) -> MethodType:
        """The replaced forward, whose signature `inspect` shows."""
        return MethodType(type(self.module).forward, self.module)

    @property
    def __code__(self) -> CodeType:
        """The code object from which torch.export takes the input names of a module that is exported alone."""
        return self.__wrapped__.__func__.__code__

    @property
    def __globals__(self) -> NoReturn:
        """Refuse to give the names of a source code, which only torch.jit.script asks of a forward."""
        raise AttributeError(
            "torch.jit.script cannot compile a patched forward: call fusednorm.unpatch(model) first, or use "
            "torch.jit.trace"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _module=ref(state["_module"]))

    def _get_only_input(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return the only argument, if it was passed by name; None if there were other arguments."""
        return None if inputs or len(named) != 1 else named.get(self.input_name)


class ForwardReplacement(NamedTuple):
    """A module's new forward, and its description for the report of `patch`.

    Attributes:
        description: the operation as which the module is computed.
        forward: the new forward.
    """

    description: str
    forward: PatchedForward


def get_forward_attribute(module: nn.Module) -> str:
    """Return the name of the attribute that must be set to replace a module's forward.

    It is usually `forward`.  A hook of accelerate occupies that attribute, and calls `_old_forward` until it
    is removed.
    """
    return "_old_forward" if {"_hf_hook", "_old_forward"} <= vars(module).keys() else "forward"


def is_forward_of_class(module: nn.Module, forward: Any) -> bool:
    """Return whether an instance's attribute is missing, or is the bound method that accelerate leaves behind.

    A module that TorchScript has compiled always has the attribute, and its class no forward.
    """
    if forward is None:
        return True
    return not isinstance(module, ScriptModule) and forward == MethodType(type(module).forward, module)


def is_supported_input(x: Any) -> bool:
    """Return whether an argument is a tensor of a class, dtype and device that the kernels support."""
    return is_unwrapped_tensor(x) and x.dtype in FLOAT_DTYPES and (x.is_cuda or x.is_cpu)


def is_unwrapped_tensor(x: Any) -> bool:
    """Return whether a value is a tensor that does not consist of other tensors, unlike a DTensor."""
    kind = type(x)
    if kind is Tensor or kind is Parameter:
        return True
    return isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x)


def promote_with_modulation(dtype: torch.dtype, *modulation: Tensor | None) -> torch.dtype:
    """Return the dtype of z * (1 + scale) + shift for a z in `dtype`, as torch promotes types."""
    for each in modulation:
        if each is not None and each.dtype is not dtype:
            dtype = torch.promote_types(dtype, each.dtype)
    return dtype


def widen_to_modulation(x: Tensor, **modulation: Tensor | None) -> Tensor:
    """Return x in the dtype that z * (1 + scale) + shift has for a z in x's dtype."""
    return x.to(promote_with_modulation(x.dtype, *modulation.values()))
