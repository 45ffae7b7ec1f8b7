"""Replacements for launchers and warm-up functions without Triton: calling them raises an error that says so."""

from collections.abc import Callable
from typing import Any, NoReturn

from fusednorm.devices.device import needs_triton


def _absent(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise needs_triton(f"fusednorm.{name}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = "Raises ModuleNotFoundError: Triton is not installed."
    return refuse


layer_norm_forward = _absent("layer_norm_forward")
layer_norm_backward = _absent("layer_norm_backward")
rms_norm_forward = _absent("rms_norm_forward")
rms_norm_backward = _absent("rms_norm_backward")
group_norm_forward = _absent("group_norm_forward")
group_norm_backward = _absent("group_norm_backward")
layer_norm_chain = _absent("layer_norm_chain")
warmup = _absent("warmup")
warmup_group_norm = _absent("warmup_group_norm")
