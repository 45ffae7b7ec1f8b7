"""Providers of norms: how each replaces torch's norms in a model."""

from collections.abc import Callable
from typing import Any

import fusednorm
from torch import nn

from benchmarks.models.diffusion_models import DiffusionBlock


class NothingReplacedError(ValueError):
    """A provider replaced no module, so that its times would be torch's."""


def keep_norms(model: nn.Module) -> None:
    """torch: replace nothing."""


def patch_norms(model: nn.Module) -> None:
    """fusednorm: apply `fusednorm.patch`, and have blocks that can use fused calls use them.

    Raises:
        NothingReplacedError: neither changed anything.
    """
    library: Any = fusednorm
    report = library.patch(model)
    blocks = [module for module in model.modules() if isinstance(module, DiffusionBlock)]
    for block in blocks:
        block.uses_fused_calls = True
    if not blocks and not any("forward" in vars(module) for module in model.modules()):
        raise NothingReplacedError(f"fusednorm.patch replaced nothing: {report}")


def replace_with_liger(model: nn.Module) -> None:
    """Liger: its modules replace LayerNorms and RMSNorms, with their parameters.

    Raises:
        NothingReplacedError: the model has none.
    """
    if not sum(_replace_children(module) for module in list(model.modules())):
        raise NothingReplacedError("the model has no LayerNorm and no RMSNorm")


def _replace_children(module: nn.Module) -> int:
    """Replace norms below a module; return their number."""
    count = 0
    for name, child in list(module.named_children()):
        replacement = _make_liger_module(child)
        if replacement is not None:
            setattr(module, name, replacement)
            count += 1
    return count


def _make_liger_module(module: nn.Module) -> nn.Module | None:
    from liger_kernel.transformers.layer_norm import LigerLayerNorm
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 1:
        return None
    replacement: nn.Module
    if type(module) is nn.LayerNorm and module.bias is not None:
        replacement = LigerLayerNorm(len(weight), module.eps, bias=True)
        replacement.bias = module.bias
    elif type(module).__name__ in ("LlamaRMSNorm", "RMSNorm"):
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
        replacement = LigerRMSNorm(len(weight), eps)
    else:
        return None
    replacement.weight = weight
    return replacement


PROVIDERS: dict[str, Callable[[nn.Module], None]] = {
    "torch": keep_norms,
    "fusednorm": patch_norms,
    "liger": replace_with_liger,
}
"""Providers by their name in the CSV; others are compared with torch's results."""
