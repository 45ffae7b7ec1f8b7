"""Runs of a norm's own forward on random data on the CPU, to compare its results with formulas.

The forward of the module's class is called not with the module itself, but with a shallow copy that has random
parameters and no hooks.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.float16: (2**-8, 2**-8), torch.bfloat16: (2**-6, 2**-6)}
"""Relative and absolute tolerances, of the lowest precision last.

A module may round x_hat before it multiplies, and the offset's sum: each half an ulp.
"""

_COMPARED = (torch.float32, torch.bfloat16)
"""The dtypes in which results must agree; other combinations may differ, and are left to the module's class."""

_GRADIENT_TOLERANCE = 1e-3
"""Relative and absolute tolerance of float32 gradients, those of x multiplied by the scale of the sample."""


class ForwardProbe:
    """A callable that runs the forward of a module's class on random data, to compare it with formulas.

    Args:
        module: a norm whose submodules, if any, have no parameters.
        shape: the shape of x, the samples first.
        eps: the number that the formula adds.
        training: whether the forward runs in training mode; default False.
        least_scale: the scale of the samples whose results eps determines; default sqrt(eps).

    Attributes:
        error: the name of the exception that the forward raised; empty if it returned results.
        changed: the name of an attribute of the module that the forward changed; empty if it changed none.
    """

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...],
        eps: float,
        training: bool = False,
        least_scale: float | None = None,
    ) -> None:
        self._module = module
        self._training = training
        self._eps = eps
        self._generator = torch.Generator("cpu").manual_seed(_SEED)
        least_scale = math.sqrt(eps) if least_scale is None else least_scale
        scales = torch.tensor([1.0, 30.0, least_scale], dtype=torch.float32, device="cpu")
        self._scales = scales.repeat(shape[0])[: shape[0]].reshape(-1, *(1 for _ in shape[1:]))
        self._x = self._draw_normal(shape) * self._scales
        self._parameters = {
            name: self._draw_normal(tuple(p.shape)) for name, p in module._parameters.items() if p is not None
        }
        self._results: dict[torch.dtype, tuple[Any, torch.dtype]] = {}
        self.changed = ""
        # Not the exception, whose traceback would keep the module alive.
        self.error = ""
        try:
            self._results = {dtype: self._call_in_dtype(dtype) for dtype in _COMPARED}
        # The forward of an unknown class may raise anything.
        except Exception as error:
            self.error = type(error).__name__

    def __call__(self, x: Tensor, parameters: dict[str, Tensor]) -> Any:
        """Call the forward and return its result.

        Args:
            x: any tensor of the probe's shape; the forward gets a copy.
            parameters: the parameters by their names.

        Raises:
            Exception: any exception of the forward.
        """
        copied = copy_with_parameters(self._module, parameters, self._training)
        # torch warns about mixed dtypes, which only this check uses.
        with warnings.catch_warnings(action="ignore"):
            given = x.clone()
            version = given._version
            result = type(copied).forward(copied, given)
        self.changed = self.changed or _find_change(self._module, copied)
        if given._version != version:
            self.changed = "x"
        return result

    def matches_formula(self, formula: NormFormula) -> bool:
        """Return whether float32 and bfloat16 results agree with the formula, up to rounding of intermediates."""
        return not self.error and all(
            isinstance(y, Tensor) and y.dtype == dtype and self._agrees(y, formula, dtype, parameter_dtype)
            for dtype, (y, parameter_dtype) in self._results.items()
        )

    def matches_strides(self, formula: NormFormula) -> bool:
        """Return whether results for an x with other strides agree with the formula, unless the forward raises."""
        axes = list(range(self._x.dim()))
        # The samples last in memory, then the channels last.
        for order in ([*axes[::-1]], [0, *axes[2:], *axes[1:2]]):
            back = [order.index(axis) for axis in axes]
            x = self._x.permute(order).contiguous().permute(back)
            try:
                y = self._call_without_grad(x, torch.float32)
            except RuntimeError:
                continue
            if not self._agrees(y, formula, torch.float32, torch.float32):
                return False
        return True

    def matches_gradients(self, formula: NormFormula) -> bool:
        """Return whether float32 gradients of x and of the parameters agree with those of the formula.

        They also do if the forward has no gradients because it raises RuntimeError.
        """
        dy = torch.linspace(-1.0, 1.0, self._x.numel(), dtype=torch.float32, device="cpu").view(self._x.shape)
        gradients = []
        for compute in (self, self._compute_formula_of(formula)):
            leaves = {name: each.clone().requires_grad_() for name, each in self._parameters.items()}
            x = self._x.clone().requires_grad_()
            try:
                with torch.enable_grad():
                    y = compute(x, leaves)
                if not y.requires_grad:
                    return False
                dx, *others = torch.autograd.grad(y, [x, *leaves.values()], dy, allow_unused=True)
            except RuntimeError:
                return True
            gradients.append([None if dx is None else dx * self._scales, *others])
        return all(
            one is not None
            and other is not None
            and torch.allclose(one, other, _GRADIENT_TOLERANCE, _GRADIENT_TOLERANCE, equal_nan=True)
            for one, other in zip(*gradients, strict=True)
        )

    def find_result_dtypes(self, formula: NormFormula) -> Dtypes:
        """Run the forward with each dtype of x and of the parameters, and return the dtypes of y.

        Combinations for which the forward raises RuntimeError, or its results differ from the formula, are left
        out.
        """
        found = {}
        for x_dtype in FLOAT_DTYPES:
            for parameter_dtype in FLOAT_DTYPES:
                try:
                    y = self._call_without_grad(self._x.to(x_dtype), parameter_dtype)
                except RuntimeError:
                    continue
                if self._agrees(y, formula, x_dtype, parameter_dtype):
                    found[x_dtype, parameter_dtype] = y.dtype
        return found

    def returns_channels_last(self) -> bool:
        """Return whether y of the contiguous x has its channels, dim 1, last in memory."""
        y, _ = self._results[torch.float32]
        return not y.is_contiguous() and y.movedim(1, -1).is_contiguous()

    def find_autocast_dtypes(self, formula: NormFormula) -> Dtypes:
        """Find the dtypes of y under CUDA's autocast, whose casts are emulated because the CPU has none."""
        with _EmulatedCudaAutocast():
            return self.find_result_dtypes(formula)

    def _agrees(self, y: Tensor, formula: NormFormula, dtype: torch.dtype, parameter_dtype: torch.dtype) -> bool:
        """Return whether y agrees with the formula for an x in `dtype` and the parameters' dtype."""
        parameters = {name: each.to(parameter_dtype).float() for name, each in self._parameters.items()}
        try:
            want = self._compute_formula_of(formula)(self._x.to(dtype).float(), parameters)
        except KernelInputError:
            return False
        if y.dtype not in _TOLERANCES or y.shape != want.shape:
            return False
        lowest = max(dtype, parameter_dtype, y.dtype, key=list(_TOLERANCES).index)
        return torch.allclose(y.float(), want, *_TOLERANCES[lowest], equal_nan=True)

    def _compute_formula_of(self, formula: NormFormula) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
        """Return the function that computes a formula from x and the parameters by their names."""

        def compute(x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
            weight, bias = (
                None if name is None else parameters[name] for name in (formula.weight_name, formula.bias_name)
            )
            return formula.compute(x, weight, bias, self._eps)

        return compute

    def _call_in_dtype(self, dtype: torch.dtype) -> tuple[Any, torch.dtype]:
        """Call the forward with an x in `dtype`; return its result and the dtype of the parameters.

        That is float32 if the forward rejects parameters in `dtype`, else `dtype`.
        """
        x = self._x.to(dtype)
        try:
            return self._call_without_grad(x, dtype), dtype
        except RuntimeError:
            return self._call_without_grad(x, torch.float32), torch.float32

    def _call_without_grad(self, x: Tensor, parameter_dtype: torch.dtype) -> Any:
        with torch.no_grad():
            return self(x, {name: each.to(parameter_dtype) for name, each in self._parameters.items()})

    def _draw_normal(self, shape: Iterable[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self._generator, device="cpu", dtype=torch.float32)


class ProbeSet:
    """Probes of a norm with x of several ranks, since a forward may do something else for each.

    Args:
        module, eps, training, least_scale: as in `ForwardProbe`.
        sizes: the shapes over which the norm has parameters, all of which are tried.
    """

    def __init__(
        self,
        module: nn.Module,
        sizes: Sequence[tuple[int, ...]],
        eps: float,
        training: bool = False,
        least_scale: float | None = None,
    ) -> None:
        self._module = module
        self._training = training
        self._sizes = sizes
        self._eps = eps
        self._least_scale = least_scale
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
            self._probes[shape] = ForwardProbe(self._module, shape, self._eps, self._training, self._least_scale)
        return self._probes[shape]


def copy_with_parameters(module: nn.Module, parameters: Mapping[str, Tensor | None], training: bool) -> nn.Module:
    """Make a shallow copy of a norm with other parameters and without hooks; those that are left out are None."""
    copied: nn.Module = object.__new__(type(module))
    children = {name: child and copy_without_hooks(child) for name, child in module._modules.items()}
    own = {name: copy(value) for name, value in get_own_attributes(module).items()}
    copied.__dict__.update(module.__dict__, **own, _modules=children)
    copied._parameters = dict.fromkeys(module._parameters) | dict(parameters)
    copied.training = training
    return copied


def get_own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that not every module has."""
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


def _find_change(module: nn.Module, copied: nn.Module) -> str:
    """Return the name of an attribute that a copy of a module has lost, gained or changed; empty without one."""
    before, after = get_own_attributes(module), get_own_attributes(copied)
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
