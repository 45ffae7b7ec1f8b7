"""The activation modules that the kernels can fuse with the norm before them."""

from torch import nn

from fusednorm.api.patching.patched_forward import is_forward_of_class


def find_activation_name(module: nn.Module) -> str | None:
    """Return the kernels' name for one of torch's activation modules, or None.

    It is also None if the module's forward is replaced.
    """
    if not is_forward_of_class(module, vars(module).get("forward")):
        return None
    kind = type(module)
    if kind is nn.SiLU:
        return "silu"
    if kind is nn.ReLU:
        return "relu"
    if kind is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return None


def find_inner_activation(module: nn.Module) -> str | None:
    """Return the name of the activation among a norm's own submodules; "none" if they are all identities.

    Return None if there is any other submodule, a second activation, or one with a replaced forward.
    """
    found = "none"
    for child in module._modules.values():
        if child is None or (type(child) is nn.Identity and is_forward_of_class(child, vars(child).get("forward"))):
            continue
        name = find_activation_name(child)
        if name is None or found != "none":
            return None
        found = name
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
