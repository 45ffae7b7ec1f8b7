"""The object that `patch` assigns to a norm's `forward`.

An attribute of the instance is not bound to it, so each object refers to its module.  The reference is weak: with
a reference cycle a model's memory would be freed only by the garbage collector.  After a deep copy it refers to
the copied module, after unpickling to the unpickled one.  A call that the kernels do not support goes to the
forward of the module's class.
"""

from types import CodeType, MethodType
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusednorm.arguments.checks import FLOAT_DTYPES
from fusednorm.errors import KernelInputError


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

    takes_activation = False
    """Whether `compute` takes more: the name of an activation behind the norm, and scale and shift before that."""

    def __init__(self, module: nn.Module, input_name: str) -> None:
        self._module = ref(module)
        self.input_name = input_name

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The forward of the module's class, computed by the kernels where they take x."""
        # Not the property: it costs a call for each of a model's norms.
        module = self._module()
        if module is None:
            module = self.module
        if is_compiling() and not self.is_traced:
            return type(module).forward(module, *inputs, **named)
        x = inputs[0] if len(inputs) == 1 and not named else self._only_input(inputs, named)
        kind = type(x)
        is_known = kind is Tensor or kind is Parameter or is_plain(x)
        if is_known and x.dtype in FLOAT_DTYPES and (x.is_cuda or x.is_cpu):
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
            raise ReferenceError("the patched module no longer exists: copy patched modules by copy.deepcopy")
        return module

    @property
    def __wrapped__(self) -> MethodType:
        """The forward that it replaces, whose signature `inspect` shows."""
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


class Replacement(NamedTuple):
    """Of the forward of a module.

    Attributes:
        description: what the module is computed as.
        forward: what replaces its forward.
    """

    description: str
    forward: PatchedForward


def may_be_taken(x: Any) -> bool:
    """Whether an argument is a tensor of a kind, dtype and device that there are kernels for."""
    return is_plain(x) and x.dtype in FLOAT_DTYPES and (x.is_cuda or x.is_cpu)


def is_plain(x: Any) -> bool:
    """Whether a value is a tensor, and none that consists of others, as DTensor does."""
    kind = type(x)
    if kind is Tensor or kind is Parameter:
        return True
    return isinstance(x, Tensor) and not is_traceable_wrapper_subclass(x)
