"""`patch` and `unpatch` for all norms of a model."""

from collections.abc import Callable
from inspect import unwrap
from types import MethodType

from torch import nn
from torch.jit import ScriptModule

from fusednorm.api.patching.adaptive_norms import find_adaptive_replacement
from fusednorm.api.patching.fused_blocks import find_block_replacement
from fusednorm.api.patching.norm_forwards import find_norm_replacement
from fusednorm.api.patching.norm_recognition import UnpatchableModuleError
from fusednorm.api.patching.patched_forward import PatchedForward, get_forward_attribute
from fusednorm.api.patching.report import PatchReport
from fusednorm.devices.device_properties import HAS_TRITON
from fusednorm.errors import KernelInputError

if HAS_TRITON:
    from fusednorm.launch.call_status import describe_repeated_calls


def patch(model: nn.Module, only: Callable[[str, nn.Module], bool] | None = None) -> PatchReport:
    """Replace the forward of a model's norms by this library's functions, in place.

    Classes, parameters and their names, state_dict and hooks stay, and so do the results of a call, including
    their dtype under autocast; a float16 or bfloat16 result is rounded once.  A call that the kernels do not
    support, such as one in float64, runs the forward of the module's class.  Copies by `copy.deepcopy` and by
    pickle are patched as well.  Patched modules accept CPU tensors, which torch's functions compute at torch's
    speed.

    Patched are torch's LayerNorm, RMSNorm, GroupNorm, and InstanceNorm without running statistics, and classes that
    inherit their forward; and classes that are named like norms, with at most a weight and a bias, if their results
    on a little random data on the CPU are those of `layer_norm`, `rms_norm` or `group_norm`, possibly over
    channels, with a `weight_offset` of 1 or with an activation.  The adaptive norms of diffusers compute norm,
    scale and shift in one call.  A norm and the SiLU, ReLU, LeakyReLU or GELU after it are one pass in a
    Sequential, and a GroupNorm and its activation in diffusers' ResnetBlock2D, as long as neither has hooks.

    Args:
        model: an nn.Module on any device; nothing is moved, and parameters are not changed.
        only: called with the path (str) and the module of each norm, or block around norms, that could be patched;
            returns whether to patch it.  None (default) patches all.

    Returns:
        PatchReport: by path, the patched modules, and the others with the reason; and how calls on a GPU are made.
            Its `str` is for people.

    Raises:
        KernelInputError: the model is not an instance of nn.Module, or `only` is neither a function nor None.

    Examples:
        >>> import torch, fusednorm
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
        >>> report = fusednorm.patch(model)
        >>> list(report.patched)
        ['1']
        >>> model(torch.randn(8, 64)).shape
        torch.Size([8, 64])
    """
    _check_model(model)
    if only is not None and not callable(only):
        raise KernelInputError(
            f"only must be a function of path and module, or None, got {type(only).__name__}: write "
            f"only=lambda path, module: path in paths"
        )
    patched: dict[str, str] = {}
    skipped: dict[str, str] = {}
    modules = []
    for path, module in model.named_modules():
        # The class of a compiled module has no forward.
        if not isinstance(module, ScriptModule):
            modules.append((path, module))
        elif "norm" in module.original_name.lower():
            skipped[path] = "compiled by TorchScript, which keeps its forward"
    # Blocks last: what they fuse depends on the norms that are patched.
    for replace in (find_norm_replacement, find_adaptive_replacement, find_block_replacement):
        for path, module in modules:
            try:
                found = replace(module)
                if found is None:
                    continue
                if only is not None and not only(path, module):
                    raise UnpatchableModuleError("left out by `only`")
            except UnpatchableModuleError as reason:
                if path not in patched:
                    skipped[path] = str(reason)
                continue
            setattr(module, get_forward_attribute(module), found.forward)
            patched[path] = found.description
            skipped.pop(path, None)
    on_cpu = sum(any(parameter.is_cpu for parameter in dict(modules)[path].parameters()) for path in patched)
    return PatchReport(patched, skipped, on_cpu, describe_repeated_calls() if HAS_TRITON else "")


def unpatch(model: nn.Module) -> None:
    """Restore every forward that `patch` replaced in a model and its modules, in place.

    A model that was never patched stays as it is.

    Args:
        model: an nn.Module on any device.

    Raises:
        KernelInputError: the model is not an instance of nn.Module; or other code has wrapped forwards since they
            were patched, and all others are unpatched.

    Examples:
        >>> import torch, fusednorm
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(64))
        >>> report = fusednorm.patch(model)
        >>> fusednorm.unpatch(model)
    """
    _check_model(model)
    wrapped = []
    for path, module in model.named_modules():
        attribute = get_forward_attribute(module)
        forward = vars(module).get(attribute)
        if forward is None:
            continue
        if isinstance(forward, PatchedForward):
            if attribute == "forward":
                del module.forward
            else:
                # A hook calls it.
                setattr(module, attribute, MethodType(type(module).forward, module))
        elif isinstance(unwrap(forward, stop=_is_patched), PatchedForward):
            wrapped.append(path or "the model itself")
    if wrapped:
        raise KernelInputError(
            f"unpatch expected forwards as patch left them, got wrapped ones in {', '.join(wrapped)}: "
            "remove the wrappers, and call unpatch again"
        )


def _check_model(model: object) -> None:
    """Raise KernelInputError unless the argument is an instance of nn.Module."""
    if isinstance(model, type):
        raise KernelInputError(f"model must be an instance of nn.Module, got the class {model.__name__}")
    if not isinstance(model, nn.Module):
        raise KernelInputError(f"model must be an instance of nn.Module, got {type(model).__name__}")


def _is_patched(forward: object) -> bool:
    return isinstance(forward, PatchedForward)
