"""The activation modules that the kernels can fuse with the norm before them."""

from typing import Any, NamedTuple

from torch import nn

from fusednorm.api.patching.patched_forward import is_forward_of_class


class ActivationOptions(NamedTuple):
    """The options of this library's functions that stand for an activation.

    Attributes:
        activation: its name; "none" (default) without one.
        negative_slope: leaky_relu's factor of negative values; default 0.01.
    """

    activation: str = "none"
    negative_slope: float = 0.01

    def __str__(self) -> str:
        return self.activation


NO_ACTIVATION = ActivationOptions()


def find_activation(module: Any) -> ActivationOptions | None:
    """Return the options that stand for one of torch's activation modules; None for another module.

    It is also None if the module's forward is replaced.
    """
    if not is_forward_of_class(module, vars(module).get("forward")):
        return None
    kind = type(module)
    if kind is nn.SiLU:
        return ActivationOptions("silu")
    if kind is nn.ReLU:
        return ActivationOptions("relu")
    if kind is nn.LeakyReLU:
        return ActivationOptions("leaky_relu", module.negative_slope)
    if kind is nn.GELU:
        return ActivationOptions("gelu_tanh" if module.approximate == "tanh" else "gelu")
    return None


def find_inner_activation(module: nn.Module) -> ActivationOptions | None:
    """Return the activation among a norm's own submodules; NO_ACTIVATION if they are all identities.

    Return None if there is any other submodule, a second activation, or one with a replaced forward.
    """
    found = NO_ACTIVATION
    for child in module._modules.values():
        if child is None or (type(child) is nn.Identity and is_forward_of_class(child, vars(child).get("forward"))):
            continue
        activation = find_activation(child)
        if activation is None or found != NO_ACTIVATION:
            return None
        found = activation
    return found


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module runs hooks, the module's own or global ones."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or nn.modules.module._has_any_global_hook()
    )
