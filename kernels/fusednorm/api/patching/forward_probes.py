"""Runs of a norm's own forward on random data on the CPU, to compare its results with formulas.

The forward of the module's class is called not with the module itself, but with a shallow copy that has random
parameters and no hooks.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fusednorm.api.module_norms import AUTOCASTS_RMS_NORM
from fusednorm.api.patching.norm_formulas import NormFormula
from fusednorm.errors import KernelInputError
from fusednorm.tensors.arrays import FLOAT_DTYPES

Dtypes = dict[tuple[torch.dtype, torch.dtype], torch.dtype]
"""The dtype of y, by the dtypes of x and of the parameters."""

OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward", "_hf_hook", "_old_forward"})
"""Attributes that do not change what a class's forward computes; the last two are accelerate's."""

RANKS = (2, 3, 4, 5)
"""The numbers of axes of x that are tried."""

_SEED = 7
_TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2**-6, 2**-6)}
"""Relative and absolute tolerances.

A module may round x_hat before it multiplies, and the offset's sum: each half an ulp.
"""


class ForwardProbe:
    """A callable that runs the forward of a module's class on random data, to compare it with formulas.

    Args:
        module: a norm whose submodules, if any, have no parameters.
        shape: the shape of x, the samples first.
        eps: the number that the formula adds; x has samples with squares of about that size.
        training: whether the forward runs in training mode; default False.

    Attributes:
        error: the name of the exception that the forward raised; empty if it returned results.
        changed: the name of an attribute of the module that the forward changed; empty if it changed none.
    """

    def __init__(self, module: nn.Module, shape: tuple[int, ...], eps: float, training: bool = False) -> None:
        self._module = module
        self._training = training
        self._eps = eps
        self._generator = torch.Generator("cpu").manual_seed(_SEED)
        scales = torch.tensor([1.0, 30.0, math.sqrt(eps)], dtype=torch.float32, device="cpu")
        scales = scales.repeat(shape[0])[: shape[0]]
        self._x = self._draw_normal(shape) * scales.reshape(-1, *(1 for _ in shape[1:]))
        self._parameters = {
            name: self._draw_normal(tuple(p.shape)) for name, p in module._parameters.items() if p is not None
        }
        self._results: dict[torch.dtype, tuple[Any, torch.dtype]] = {}
        self.changed = ""
        # Not the exception, whose traceback would keep the module alive.
        self.error = ""
        try:
            self._results = {dtype: self._call_in_dtype(dtype) for dtype in _TOLERANCES}
        # The forward of an unknown class may raise anything.
        except Exception as error:
            self.error = type(error).__name__

    def __call__(self, x_dtype: torch.dtype, parameter_dtype: torch.dtype) -> Any:
        """Call the forward and return its result.

        Raises:
            Exception: any exception of the forward.
        """
        copied = object.__new__(type(self._module))
        parameters: dict[str, nn.Parameter | None] = dict.fromkeys(self._module._parameters)
        for name, values in self._parameters.items():
            parameters[name] = nn.Parameter(values.to(parameter_dtype), requires_grad=False)
        children = {name: child and copy_without_hooks(child) for name, child in self._module._modules.items()}
        own = {name: copy(value) for name, value in _get_own_attributes(self._module).items()}
        copied.__dict__.update(self._module.__dict__, **own, _parameters=parameters, _modules=children)
        copied.training = self._training
        # torch warns about mixed dtypes, which only this check uses.
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            result = type(copied).forward(copied, self._x.to(x_dtype))
        self.changed = self.changed or _find_change(self._module, copied)
        return result

    def matches_formula(self, formula: NormFormula) -> bool:
        """Return whether float32 and bfloat16 results agree with the formula, up to rounding of intermediates."""
        return not self.error and all(self._matches_in_dtype(formula, dtype) for dtype in _TOLERANCES)

    def find_result_dtypes(self) -> Dtypes:
        """Run the forward with each dtype of x and of the parameters, and return the dtypes of y.

        Combinations for which the forward raises RuntimeError are left out.
        """
        found = {}
        for x_dtype in FLOAT_DTYPES:
            for parameter_dtype in FLOAT_DTYPES:
                try:
                    found[x_dtype, parameter_dtype] = self(x_dtype, parameter_dtype).dtype
                except RuntimeError:
                    continue
        return found

    def returns_channels_last(self) -> bool:
        """Return whether y of the contiguous x has its channels, dim 1, last in memory."""
        y, _ = self._results[torch.float32]
        return not y.is_contiguous() and y.movedim(1, -1).is_contiguous()

    def find_autocast_dtypes(self) -> Dtypes:
        """Find the dtypes of y under CUDA's autocast, whose casts are emulated because the CPU has none."""
        with _EmulatedCudaAutocast():
            return self.find_result_dtypes()

    def _matches_in_dtype(self, formula: NormFormula, dtype: torch.dtype) -> bool:
        """Return whether y has `dtype` and agrees with the formula for an x in `dtype`."""
        y, parameter_dtype = self._results[dtype]
        weight, bias = (
            None if name is None else self._parameters[name].to(parameter_dtype).float()
            for name in (formula.weight_name, formula.bias_name)
        )
        try:
            want = formula.compute(self._x.to(dtype).float(), weight, bias, self._eps)
        except KernelInputError:
            return False
        if not isinstance(y, Tensor) or y.dtype != dtype or y.shape != want.shape:
            return False
        relative, absolute = _TOLERANCES[dtype]
        return torch.allclose(y.float(), want, relative, absolute, equal_nan=True)

    def _call_in_dtype(self, dtype: torch.dtype) -> tuple[Any, torch.dtype]:
        """Call the forward with an x in `dtype`; return its result and the dtype of the parameters.

        That is float32 if the forward rejects parameters in `dtype`, else `dtype`.
        """
        try:
            return self(dtype, dtype), dtype
        except RuntimeError:
            return self(dtype, torch.float32), torch.float32

    def _draw_normal(self, shape: Iterable[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self._generator, device="cpu", dtype=torch.float32)


class ProbeSet:
    """Probes of a norm with x of several ranks, since a forward may do something else for each.

    Args:
        module, eps, training: as in `ForwardProbe`.
        sizes: the shapes over which the norm has parameters, all of which are tried.
    """

    def __init__(
        self, module: nn.Module, sizes: Sequence[tuple[int, ...]], eps: float, training: bool = False
    ) -> None:
        self._module = module
        self._training = training
        self._sizes = sizes
        self._eps = eps
        self._probes: dict[tuple[int, ...], ForwardProbe] = {}

    def find_matching_probes(self, formula: NormFormula) -> dict[int, ForwardProbe]:
        """Find the ranks of x for which the results agree with a formula for all sizes, each with a probe."""
        found = {}
        for rank in RANKS:
            shapes = [shape for size in self._sizes if (shape := formula.make_sample_shape(rank, size))]
            probes = [self._get_probe(shape) for shape in shapes]
            if probes and all(probe.matches_formula(formula) for probe in probes):
                found[rank] = probes[0]
        return found

    def find_error(self) -> str:
        """Return the name of the first probe's exception if no probe has results; else an empty string."""
        errors = [probe.error for probe in self._probes.values()]
        return errors[0] if all(errors) else ""

    def find_change(self) -> str:
        """Return the name of an attribute that the forward changed for a probe; empty if it changed none."""
        return next((probe.changed for probe in self._probes.values() if probe.changed), "")

    def _get_probe(self, shape: tuple[int, ...]) -> ForwardProbe:
        if shape not in self._probes:
            self._probes[shape] = ForwardProbe(self._module, shape, self._eps, self._training)
        return self._probes[shape]


def _get_own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that not every module has."""
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


def _find_change(module: nn.Module, copied: nn.Module) -> str:
    """Return the name of an attribute that a copy of a module has lost, gained or changed; empty without one."""
    before, after = _get_own_attributes(module), _get_own_attributes(copied)
    return next((name for name in before | after if name not in before or before[name] != after.get(name)), "")


def copy_without_hooks(module: nn.Module) -> nn.Module:
    """Make a shallow copy of a module whose own parameters and submodules are left out, and which has no hooks."""
    copied: nn.Module = object.__new__(type(module))
    nn.Module.__init__(copied)
    copied.__dict__.update({name: value for name, value in vars(module).items() if name not in vars(copied)})
    return copied.train(module.training)


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
    """Mode that casts arguments of norm functions to float32, as CUDA's autocast does, for probes on the CPU."""

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
