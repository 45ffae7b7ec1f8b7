"""Recognition of norms by a module's class or results, or of the reason why a module is not patched.

Results are computed by the forward of the module's class, from a little random data on the CPU.  It is called not
with the module itself, but with a shallow copy that has random parameters and no hooks.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode

from fusednorm.api.module_norms import AUTOCASTS_RMS_NORM
from fusednorm.api.patching.patched_forward import PatchedForward, get_forward_attribute, is_forward_of_class
from fusednorm.arguments.checks import MAX_COLS, validate_eps
from fusednorm.errors import KernelInputError
from fusednorm.tensors.arrays import FLOAT_DTYPES

_SEED = 7
_TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2**-6, 2**-6)}
"""Relative and absolute tolerances.

A module may round x_hat before it multiplies, and the offset's sum: each half an ulp.
"""

_EPS_NAMES = ("variance_epsilon", "eps")
_PLAIN = (bool, int, float, str, tuple, list, torch.dtype, torch.device, type(None))
"""Types of the attributes that an instance of a norm may have besides its parameters."""

_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "forward", "_hf_hook", "_old_forward"})
"""Attributes that do not change what a class's forward computes; the last two are accelerate's."""

_NORM_FUNCTIONS = frozenset({"layer_norm", "rms_norm", "group_norm"})
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

_TIMM = {
    "timm.layers.norm.LayerNorm": nn.LayerNorm,
    "timm.layers.norm.GroupNorm": nn.GroupNorm,
    "timm.layers.norm.GroupNorm1": nn.GroupNorm,
}
"""Classes of timm that call torch's function in a forward of their own, and their base classes."""

Dtypes = dict[tuple[torch.dtype, torch.dtype], torch.dtype]
"""The dtype of y, by the dtypes of x and of the parameters."""

_Formula = Callable[[Tensor, dict[str, Tensor], float], Tensor]
"""A function that computes y in float32 from x, the module's parameters by name (all float32) and eps."""


@dataclass(frozen=True)
class ProbedProperties:
    """The properties of an RMSNorm that were determined from the results of its forward.

    Attributes:
        eps_name: the name of the module's attribute that is added to the mean square.
        weight_offset: 0, or 1 for a weight that is stored around zero.
        result_dtypes: the dtypes that the module returns; autocast_dtypes: the same under CUDA's autocast.
    """

    eps_name: str
    weight_offset: float
    result_dtypes: Dtypes
    autocast_dtypes: Dtypes


@dataclass(frozen=True)
class RecognisedNorm:
    """Result of `recognise_norm` for a module that can be patched: the operation that computes it.

    Attributes:
        operation: layer_norm, rms_norm or group_norm.
        probed: the observed properties of a module that is recognised only by its results.
        class_name: the name of that module's class.
    """

    operation: str
    probed: ProbedProperties | None = None
    class_name: str = ""

    @property
    def description(self) -> str:
        """The operation's name, for a report, followed by a probed module's weight offset and class."""
        if self.probed is None:
            return self.operation
        offset = ", weight_offset=1" if self.probed.weight_offset else ""
        return f"{self.operation}{offset}, as {self.class_name} has it"


class UnpatchableModuleError(Exception):
    """A module must not be patched; the message has the reason."""


def recognise_norm(module: nn.Module) -> RecognisedNorm | None:
    """Determine which norm a module is; None if neither its class nor its forward's code names one.

    Raises:
        UnpatchableModuleError: the kernels cannot compute the norm, or it must not be patched.
    """
    kind = type(module)
    if not _looks_like_norm(module):
        if function := _find_called_norm(module):
            raise UnpatchableModuleError(f"its forward calls the function {function}: only modules are patched")
        return None
    check_not_replaced(module)
    if kind.__module__.startswith("fusednorm."):
        raise UnpatchableModuleError("on these kernels already")
    for torch_class, recognise_one in _OF_TORCH.items():
        if kind.forward is torch_class.forward:
            return recognise_one(module)
    if getattr(module, "_fast_norm", False):
        raise UnpatchableModuleError("timm's fast norm is switched on, which autocast treats otherwise")
    of_timm = _TIMM.get(f"{kind.__module__}.{kind.__qualname__}")
    if of_timm is not None and isinstance(module, of_timm):
        return _recognise_timm_norm_by_results(module, of_timm)
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
        raise UnpatchableModuleError(f"{kind.__name__} has a forward of its own")
    if isinstance(module, _INSTANCE_NORMS) and not module.track_running_stats:
        raise UnpatchableModuleError(f"{kind.__name__} is patched if written as a GroupNorm of one channel a group")
    if kind.__module__.startswith("torch."):
        raise UnpatchableModuleError(f"no kernel for {kind.__name__}")
    return _recognise_rms_norm_by_results(module)


def _looks_like_norm(module: nn.Module) -> bool:
    """Return whether a module is one of torch's norms, or its class is named like a norm.

    A module that is only named like a norm must not contain another one.
    """
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)):
        return True
    return _is_named_norm(module) and not any(map(_is_named_norm, list(module.modules())[1:]))


def _is_named_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _find_called_norm(module: nn.Module) -> str | None:
    """Find the name of a norm function that a module's forward calls; None if it calls none.

    The names are those in the forward's code; one that is also the name of a submodule is ignored.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    for name in _NORM_FUNCTIONS.intersection(code.co_names if code else ()):
        if all(path.rpartition(".")[2] != name for path, _ in module.named_modules()):
            return name
    return None


def check_not_replaced(module: nn.Module) -> None:
    """Raise UnpatchableModuleError if a module's forward is no longer that of its class.

    A hook of accelerate that calls the class's forward is accepted.
    """
    forward = vars(module).get(get_forward_attribute(module))
    if isinstance(forward, PatchedForward):
        raise UnpatchableModuleError("patched already")
    if not is_forward_of_class(module, forward):
        raise UnpatchableModuleError("its forward is replaced by another")


def get_input_name(module: nn.Module) -> str:
    """Return the name of the first parameter of the forward of a module's class."""
    return list(inspect.signature(type(module).forward).parameters)[1]


def _recognise_layer_norm(module: Any) -> RecognisedNorm:
    """Check the shapes and eps of a torch.nn.LayerNorm, and return its `RecognisedNorm`."""
    _check_shapes(module, tuple(module.normalized_shape))
    _check_eps(module.eps)
    return RecognisedNorm("layer_norm")


def _recognise_rms_norm(module: Any) -> RecognisedNorm:
    """Check the shapes and eps of a torch.nn.RMSNorm, and return its `RecognisedNorm`."""
    _check_shapes(module, tuple(module.normalized_shape))
    if module.eps is not None:
        _check_eps(module.eps)
    return RecognisedNorm("rms_norm")


def _recognise_group_norm(module: Any) -> RecognisedNorm:
    """Check the shapes and eps of a torch.nn.GroupNorm, and return its `RecognisedNorm`."""
    _check_shapes(module, (module.num_channels,))
    _check_eps(module.eps)
    return RecognisedNorm("group_norm")


_OF_TORCH: dict[type[nn.Module], Callable[[Any], RecognisedNorm]] = {
    nn.LayerNorm: _recognise_layer_norm,
    nn.RMSNorm: _recognise_rms_norm,
    nn.GroupNorm: _recognise_group_norm,
}


def _recognise_timm_norm_by_results(module: Any, base: type[nn.Module]) -> RecognisedNorm:
    """Recognise a norm of timm as a norm of torch's class `base`, after a comparison of results on random data.

    Raises:
        UnpatchableModuleError: the results differ, or the kernels do not support the module.
    """
    found = _OF_TORCH[base](module)
    if base is nn.GroupNorm:
        shape, formula = (3, module.num_channels, 2, 2), _make_group_norm_formula(module.num_groups)
    else:
        if len(module.normalized_shape) != 1:
            raise UnpatchableModuleError(f"normalized_shape {list(module.normalized_shape)} is of several axes")
        shape, formula = (3, 2, *module.normalized_shape), _compute_layer_norm
    if not _matches_formula(_ForwardProbe(module, shape, module.eps), formula):
        raise UnpatchableModuleError(f"{type(module).__name__} computes something else than {found.description}")
    return found


def _recognise_rms_norm_by_results(module: Any) -> RecognisedNorm:
    """Recognise an RMSNorm of any class by its results on random data.

    Raises:
        UnpatchableModuleError: the module computes no RMSNorm, or has attributes that might change its
            results.
    """
    name = type(module).__name__
    parameters = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    weight, eps_name = parameters.get("weight"), _find_eps_attribute(module)
    others = parameters.keys() - {"weight", "bias"}
    if weight is None or weight.dim() != 1 or eps_name is None or others or module._buffers or module._modules:
        raise UnpatchableModuleError(
            f"{name} is not compared with kernels: expected weight [cols], eps or variance_epsilon, and at most a "
            "bias"
        )
    for key, value in vars(module).items():
        if key not in _OF_EVERY_MODULE and not isinstance(value, _PLAIN):
            raise UnpatchableModuleError(f"{name} has {key}, which is unknown")
    eps = getattr(module, eps_name)
    _check_eps(eps)
    _check_parameter("weight", weight, tuple(weight.shape))
    probe = _ForwardProbe(module, (3, 2, weight.shape[0]), eps)
    for offset in (0.0, 1.0):
        if "bias" not in parameters and _matches_formula(probe, _make_rms_norm_formula(offset)):
            observed = ProbedProperties(eps_name, offset, probe.find_result_dtypes(), probe.find_autocast_dtypes())
            return RecognisedNorm("rms_norm", observed, name)
    if _matches_formula(probe, _compute_layer_norm):
        raise UnpatchableModuleError(
            f"{name} computes layer_norm: patched are classes with the forward of nn.LayerNorm"
        )
    raise UnpatchableModuleError(f"{name} computes neither rms_norm nor layer_norm")


def _find_eps_attribute(module: nn.Module) -> str | None:
    return next((name for name in _EPS_NAMES if isinstance(module.__dict__.get(name), float)), None)


def _check_eps(eps: float) -> None:
    """Raise UnpatchableModuleError unless eps is a finite number of at least 0."""
    try:
        validate_eps(eps)
    except KernelInputError as error:
        raise UnpatchableModuleError(str(error)) from error


def _check_shapes(module: Any, shape: tuple[int, ...]) -> None:
    """Raise UnpatchableModuleError for a shape or parameters that no kernel supports."""
    size = torch.Size(shape).numel()
    if not shape or not 0 < size <= MAX_COLS:
        raise UnpatchableModuleError(f"no kernel takes normalized_shape {list(shape)}")
    for name in ("weight", "bias"):
        _check_parameter(name, getattr(module, name, None), shape)


def _check_parameter(name: str, parameter: Any, shape: tuple[int, ...]) -> None:
    """Raise UnpatchableModuleError unless a parameter is None or a plain float tensor of `shape`, not sharded."""
    if parameter is None:
        return
    kind = type(parameter)
    if kind is not Parameter and kind is not Tensor:
        raise UnpatchableModuleError(f"its {name} is a {kind.__name__}")
    if parameter.is_meta:
        raise UnpatchableModuleError(f"its {name} is on the meta device, without values")
    if parameter.device.type not in ("cuda", "cpu"):
        raise UnpatchableModuleError(f"no kernel for {parameter.device.type}")
    if not parameter.numel() or tuple(parameter.shape) != shape or not parameter.untyped_storage().size():
        raise UnpatchableModuleError(f"its {name} is sharded: {list(parameter.shape)} of {list(shape)} are here")
    if parameter.dtype not in FLOAT_DTYPES:
        raise UnpatchableModuleError(f"its {name} is {str(parameter.dtype).removeprefix('torch.')}")


def _make_rms_norm_formula(weight_offset: float) -> _Formula:
    """Make a function that computes y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)."""

    def compute_rms_norm(x: Tensor, parameters: dict[str, Tensor], eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (parameters["weight"] + weight_offset)

    return compute_rms_norm


def _compute_layer_norm(x: Tensor, parameters: dict[str, Tensor], eps: float) -> Tensor:
    """Compute torch's layer_norm over the last axis."""
    return functional.layer_norm(x, x.shape[-1:], parameters.get("weight"), parameters.get("bias"), eps)


def _make_group_norm_formula(num_groups: int) -> _Formula:
    """Make a function that computes torch's group_norm with `num_groups` groups."""

    def compute_group_norm(x: Tensor, parameters: dict[str, Tensor], eps: float) -> Tensor:
        return functional.group_norm(x, num_groups, parameters.get("weight"), parameters.get("bias"), eps)

    return compute_group_norm


class _ForwardProbe:
    """A callable that runs the forward of a module's class on random data, to compare it with formulas.

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

    def matches_formula(self, formula: _Formula) -> bool:
        """Return whether float32 and bfloat16 results agree with the formula, up to rounding of intermediates."""
        return all(self._matches_in_dtype(formula, dtype) for dtype in _TOLERANCES)

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

    def find_autocast_dtypes(self) -> Dtypes:
        """Find the dtypes of y under CUDA's autocast, whose casts are emulated because the CPU has none."""
        with _EmulatedCudaAutocast():
            return self.find_result_dtypes()

    def _matches_in_dtype(self, formula: _Formula, dtype: torch.dtype) -> bool:
        """Return whether y has `dtype` and agrees with the formula for an x and parameters in `dtype`."""
        y = self(dtype, dtype)
        rounded = {name: values.to(dtype).float() for name, values in self._parameters.items()}
        want = formula(self._x.to(dtype).float(), rounded, self._eps)
        if not isinstance(y, Tensor) or y.dtype != dtype or y.shape != want.shape:
            return False
        relative, absolute = _TOLERANCES[dtype]
        return torch.allclose(y.float(), want, relative, absolute, equal_nan=True)

    def _draw_normal(self, shape: Iterable[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self._generator, device="cpu", dtype=torch.float32)


def _matches_formula(probe: _ForwardProbe, formula: _Formula) -> bool:
    """Return whether the results of a forward agree with a formula.

    Raises:
        UnpatchableModuleError: the forward raised an exception.
    """
    try:
        return probe.matches_formula(formula)
    # The forward of an unknown class may raise anything.
    except Exception as error:
        raise UnpatchableModuleError(
            f"its forward of a few random samples raised {type(error).__name__}"
        ) from error


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
