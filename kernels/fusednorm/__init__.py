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
"""

from importlib import metadata, util
from typing import TYPE_CHECKING

if util.find_spec("torch") is None:
    raise ModuleNotFoundError("fusednorm needs torch: pip install 'normserve[kernels]'", name="torch")

from fusednorm.api import operators
from fusednorm.api.autograd import (
    Added,
    add_group_norm,
    add_layer_norm,
    add_rms_norm,
    group_norm,
    layer_norm,
    rms_norm,
)
from fusednorm.api.instance_norm import InstanceNorm1d, InstanceNorm2d, InstanceNorm3d, instance_norm
from fusednorm.api.modules import GroupNorm, LayerNorm, RMSNorm
from fusednorm.api.patching.patch import patch, unpatch
from fusednorm.api.patching.report import PatchReport
from fusednorm.arguments.checks import ActivationName
from fusednorm.devices.device_properties import HAS_TRITON
from fusednorm.errors import KernelInputError, UnsupportedShapeError
from fusednorm.policy.batch_invariance import require_batch_invariance
from fusednorm.policy.cooperative_launches import allow_waiting
from fusednorm.results import Backward, Forward

if TYPE_CHECKING or HAS_TRITON:
    from fusednorm.api.chain import layer_norm_chain
    from fusednorm.api.group_norm import group_norm_backward, group_norm_forward
    from fusednorm.api.layer_norm import (
        layer_norm_backward,
        layer_norm_forward,
        rms_norm_backward,
        rms_norm_forward,
    )
    from fusednorm.api.warmup import warmup, warmup_group_norm
else:
    from fusednorm.api.missing_triton import (
        group_norm_backward,
        group_norm_forward,
        layer_norm_backward,
        layer_norm_chain,
        layer_norm_forward,
        rms_norm_backward,
        rms_norm_forward,
        warmup,
        warmup_group_norm,
    )

operators.register_operators()


def __getattr__(name: str) -> str:
    """Return `__version__`: the installed distribution's version, or "0+unknown" if it is not installed."""
    if name == "__version__":
        try:
            return metadata.version("normserve")
        except metadata.PackageNotFoundError:
            return "0+unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "reference"]


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
