"""Replacements for launchers and warm-up functions without Triton: each raises ModuleNotFoundError when called."""

from collections.abc import Callable
from typing import Any, NoReturn

from fusednorm.devices.device_properties import make_missing_triton_error


def _make_stub(name: str) -> Callable[..., NoReturn]:
    """Make the replacement of a public function, which raises ModuleNotFoundError when it is called."""

    def raise_missing_triton(*_: Any, **__: Any) -> NoReturn:
        raise make_missing_triton_error(f"fusednorm.{name}")

    raise_missing_triton.__name__ = raise_missing_triton.__qualname__ = name
    raise_missing_triton.__doc__ = "Raises ModuleNotFoundError: Triton is not installed."
    return raise_missing_triton


layer_norm_forward = _make_stub("layer_norm_forward")
layer_norm_backward = _make_stub("layer_norm_backward")
rms_norm_forward = _make_stub("rms_norm_forward")
rms_norm_backward = _make_stub("rms_norm_backward")
group_norm_forward = _make_stub("group_norm_forward")
group_norm_backward = _make_stub("group_norm_backward")
layer_norm_chain = _make_stub("layer_norm_chain")
warmup = _make_stub("warmup")
warmup_group_norm = _make_stub("warmup_group_norm")
