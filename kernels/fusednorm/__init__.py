"""Fused LayerNorm, RMSNorm and GroupNorm, forward and backward: Triton kernels, and torch's norms on a CPU.

Launchers for CUDA tensors: `layer_norm_forward`, `layer_norm_backward`, and the same for `rms_norm` and
`group_norm`; `fusednorm.reference` has the same functions in plain torch for any device.  `layer_norm_chain`
applies several LayerNorms in one pass; `fusednorm.reference.chain` has it in plain torch.  Differentiable
functions: `layer_norm`, `rms_norm`, `group_norm`, `instance_norm`, and `add_layer_norm` and so on, which normalise
x + residual.  Modules: `LayerNorm`, `RMSNorm`, `GroupNorm`, `InstanceNorm1d` to `InstanceNorm3d`; `patch` makes the
norms of an existing model use the kernels, and `unpatch` undoes it.  `warmup` compiles the kernels for a row length
in advance, `warmup_group_norm` those for a sample's shape.  `allow_waiting` disables kernels whose programs wait
for one another; `require_batch_invariance` makes the bits of a sample's result independent of the other samples in
the batch.

Differentiable functions and modules take tensors of any strides, and copy those that no kernel supports.  They also
take CPU tensors, with or without Triton.  Without Triton, launchers and
warm-up functions raise ModuleNotFoundError when they are called.

Importing this package imports neither torch nor Triton: each name is imported at its first use, and raises
ModuleNotFoundError then if it needs torch, which is not installed.  The operators `torch.ops.fusednorm` are defined
as soon as torch has been imported, too, before or after this package (adr/0055).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fusednorm.import_hooks import call_after_import

if TYPE_CHECKING:
    from fusednorm import reference as reference
    from fusednorm.api.autograd import (
        add_group_norm,
        add_layer_norm,
        add_rms_norm,
        group_norm,
        layer_norm,
        rms_norm,
    )
    from fusednorm.api.chain import layer_norm_chain
    from fusednorm.api.group_norm import group_norm_backward, group_norm_forward
    from fusednorm.api.instance_norm import InstanceNorm1d, InstanceNorm2d, InstanceNorm3d, instance_norm
    from fusednorm.api.layer_norm import (
        layer_norm_backward,
        layer_norm_forward,
        rms_norm_backward,
        rms_norm_forward,
    )
    from fusednorm.api.modules import GroupNorm, LayerNorm, RMSNorm
    from fusednorm.api.patching.patch import patch, unpatch
    from fusednorm.api.patching.report import PatchReport
    from fusednorm.api.warmup import warmup, warmup_group_norm
    from fusednorm.arguments.checks import ActivationName
    from fusednorm.errors import KernelInputError, UnsupportedShapeError
    from fusednorm.policy.batch_invariance import require_batch_invariance
    from fusednorm.policy.cooperative_launches import allow_waiting
    from fusednorm.results import Added, Backward, Forward

    __version__: str

_MODULES = {
    "ActivationName": "arguments.checks",
    "Added": "results",
    "Backward": "results",
    "Forward": "results",
    "GroupNorm": "api.modules",
    "InstanceNorm1d": "api.instance_norm",
    "InstanceNorm2d": "api.instance_norm",
    "InstanceNorm3d": "api.instance_norm",
    "KernelInputError": "errors",
    "LayerNorm": "api.modules",
    "PatchReport": "api.patching.report",
    "RMSNorm": "api.modules",
    "UnsupportedShapeError": "errors",
    "add_group_norm": "api.autograd",
    "add_layer_norm": "api.autograd",
    "add_rms_norm": "api.autograd",
    "allow_waiting": "policy.cooperative_launches",
    "group_norm": "api.autograd",
    "group_norm_backward": "api.group_norm",
    "group_norm_forward": "api.group_norm",
    "instance_norm": "api.instance_norm",
    "layer_norm": "api.autograd",
    "layer_norm_backward": "api.layer_norm",
    "layer_norm_chain": "api.chain",
    "layer_norm_forward": "api.layer_norm",
    "patch": "api.patching.patch",
    "require_batch_invariance": "policy.batch_invariance",
    "rms_norm": "api.autograd",
    "rms_norm_backward": "api.layer_norm",
    "rms_norm_forward": "api.layer_norm",
    "unpatch": "api.patching.patch",
    "warmup": "api.warmup",
    "warmup_group_norm": "api.warmup",
}
"""The module that defines each public name."""

_TRITON_MODULES = {"api.chain", "api.group_norm", "api.layer_norm", "api.warmup"}
"""Modules that need Triton, for which `api.missing_triton` has replacements."""


def _get_attribute(name: str) -> Any:
    """Import a public name, or return `__version__`: "0+unknown" if the distribution is not installed."""
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("fusednorm-core")
        except metadata.PackageNotFoundError:
            return "0+unknown"
    if name != "reference" and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = _import_name(name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = f"fusednorm.{name} needs torch: pip install fusednorm"
        raise ModuleNotFoundError(message, name="torch") from error
    # The next use finds it without this function.
    globals()[name] = value
    return value


if not TYPE_CHECKING:
    # Type checkers would take any name for one that the package has.
    __getattr__ = _get_attribute


def _import_name(name: str) -> Any:
    """Import the module that has a public name, and return what the name stands for."""
    if name == "reference":
        return import_module("fusednorm.reference")
    module = _MODULES[name]
    if module in _TRITON_MODULES:
        from fusednorm.devices.device_properties import HAS_TRITON

        module = module if HAS_TRITON else "api.missing_triton"
    return getattr(import_module(f"fusednorm.{module}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "reference"]


def _define_operators() -> None:
    """Define the operators, to which exported programs refer."""
    from fusednorm.api.operator_definitions import define_operators

    define_operators()


call_after_import("torch", _define_operators)

__all__ = [
    "ActivationName",
    "Added",
    "Backward",
    "Forward",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "KernelInputError",
    "LayerNorm",
    "PatchReport",
    "RMSNorm",
    "UnsupportedShapeError",
    "add_group_norm",
    "add_layer_norm",
    "add_rms_norm",
    "allow_waiting",
    "group_norm",
    "group_norm_backward",
    "group_norm_forward",
    "instance_norm",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_chain",
    "layer_norm_forward",
    "patch",
    "require_batch_invariance",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "unpatch",
    "warmup",
    "warmup_group_norm",
]
