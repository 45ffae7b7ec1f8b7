"""Determination of a norm's formula by calling its class's forward on a little random data on the CPU.

It calls not the module itself, but a shallow copy with random parameters and without hooks.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fusednorm.api.autocast import AUTOCASTS_RMS_NORM
from fusednorm.tensors.arrays import FLOAT_DTYPES

_SEED = 7
_TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2**-6, 2**-6)}
"""Relative and absolute tolerances.

A module may round x_hat before it multiplies, and the offset's sum: each half an ulp.
"""

Dtypes = dict[tuple[torch.dtype, torch.dtype], torch.dtype]
"""The dtype of y, by the dtypes of x and of the parameters."""

Formula = Callable[[Tensor, dict[str, Tensor], float], Tensor]
"""A function that computes y in float32 from x, the module's parameters by name (all float32) and eps."""


def make_rms_norm_formula(weight_offset: float) -> Formula:
    """Make the formula y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)."""

    def compute_rms_norm(x: Tensor, parameters: dict[str, Tensor], eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (parameters["weight"] + weight_offset)

    return compute_rms_norm


def compute_layer_norm(x: Tensor, parameters: dict[str, Tensor], eps: float) -> Tensor:
    """Compute torch's layer_norm over the last axis."""
    return functional.layer_norm(x, x.shape[-1:], parameters.get("weight"), parameters.get("bias"), eps)


def make_group_norm_formula(num_groups: int) -> Formula:
    """Make the formula of torch's group_norm."""

    def compute_group_norm(x: Tensor, parameters: dict[str, Tensor], eps: float) -> Tensor:
        return functional.group_norm(x, num_groups, parameters.get("weight"), parameters.get("bias"), eps)

    return compute_group_norm


class ForwardProbe:
    """A callable that runs the forward of a module's class.

    Args:
        module: a norm without submodules.
        shape: the shape of x, the samples first.
        eps: the number that the formula adds; x has samples with squares of about that size.
    """

    def __init__(self, module: nn.Module, shape: tuple[int, ...], eps: float) -> None:
        self._module = module
        self._eps = eps
        self._generator = torch.Generator("cpu").manual_seed(_SEED)
        scales = torch.tensor([1.0, 30.0, math.sqrt(eps)], dtype=torch.float32, device="cpu")
        scales = scales.repeat(shape[0])[: shape[0]]
        self._x = self._draw_normal(shape) * scales.reshape(-1, *(1 for _ in shape[1:]))
        self._parameters = {
            name: self._draw_normal(tuple(p.shape)) for name, p in module._parameters.items() if p is not None
        }

    def __call__(self, x_dtype: torch.dtype, parameter_dtype: torch.dtype) -> Any:
        """Call the forward and return its result.

        Raises:
            Exception: any exception of the forward.
        """
        copied = object.__new__(type(self._module))
        parameters: dict[str, nn.Parameter | None] = dict.fromkeys(self._module._parameters)
        for name, values in self._parameters.items():
            parameters[name] = nn.Parameter(values.to(parameter_dtype), requires_grad=False)
        copied.__dict__.update(self._module.__dict__, _parameters=parameters)
        # torch warns about mixed dtypes, which only this check uses.
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            return type(copied).forward(copied, self._x.to(x_dtype))

    def matches_formula(self, formula: Formula) -> bool:
        """Return whether float32 and bfloat16 results agree with the formula, up to rounding of intermediates."""
        return all(self._matches_in_dtype(formula, dtype) for dtype in _TOLERANCES)

    def find_result_dtypes(self) -> Dtypes:
        """Find the dtypes of y, without the combinations that the forward rejects."""
        found = {}
        for x_dtype in FLOAT_DTYPES:
            for parameter_dtype in FLOAT_DTYPES:
                try:
                    found[x_dtype, parameter_dtype] = self(x_dtype, parameter_dtype).dtype
                except RuntimeError:
                    continue
        return found

    def find_autocast_dtypes(self) -> Dtypes:
        """Find the dtypes of y under CUDA's autocast, whose casts are emulated because the CPU has none."""
        with _EmulatedCudaAutocast():
            return self.find_result_dtypes()

    def _matches_in_dtype(self, formula: Formula, dtype: torch.dtype) -> bool:
        y = self(dtype, dtype)
        rounded = {name: values.to(dtype).float() for name, values in self._parameters.items()}
        want = formula(self._x.to(dtype).float(), rounded, self._eps)
        if not isinstance(y, Tensor) or y.dtype != dtype or y.shape != want.shape:
            return False
        relative, absolute = _TOLERANCES[dtype]
        return torch.allclose(y.float(), want, relative, absolute, equal_nan=True)

    def _draw_normal(self, shape: Iterable[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self._generator, device="cpu", dtype=torch.float32)


_CAST = (
    functional.layer_norm,
    torch.layer_norm,
    torch.native_layer_norm,
    *((functional.rms_norm, torch.rms_norm) if AUTOCASTS_RMS_NORM else ()),
    functional.group_norm,
    torch.group_norm,
    functional.normalize,
    torch.norm,
    Tensor.norm,
    torch.linalg.vector_norm,
    torch.pow,
    Tensor.pow,
    Tensor.__pow__,
    torch.rsqrt,
    Tensor.rsqrt,
    torch.reciprocal,
    Tensor.reciprocal,
)
"""The functions that norms use and whose arguments CUDA's autocast casts to float32."""


class _EmulatedCudaAutocast(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _CAST:
            args = tuple(map(_cast_to_float32, args))
            kwargs = {name: _cast_to_float32(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _cast_to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in FLOAT_DTYPES else value
