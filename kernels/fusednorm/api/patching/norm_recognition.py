"""Recognition of norms by a module's class or results, or of the reason why a module is not patched.

Results are computed by the forward of the module's class, from a little random data on the CPU: see
`forward_probes`.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.instancenorm import _InstanceNorm

from fusednorm.api.patching.activation_modules import ActivationOptions, find_inner_activation
from fusednorm.api.patching.forward_probes import OF_EVERY_MODULE, Dtypes, ForwardProbe, ProbeSet
from fusednorm.api.patching.forward_traces import find_deciding_shape
from fusednorm.api.patching.norm_formulas import NormFormula, iterate_row_formulas
from fusednorm.api.patching.patched_forward import PatchedForward, get_forward_attribute, is_forward_of_class
from fusednorm.arguments.checks import MAX_COLS, validate_eps
from fusednorm.errors import KernelInputError
from fusednorm.tensors.arrays import FLOAT_DTYPES

_WEIGHT_NAMES, _BIAS_NAMES = ("weight", "gamma", "scale"), ("bias", "beta", "shift")
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_EPS_CONSTANTS = (1e-5, 1e-6, 1e-8, 1e-12)
"""The eps that a norm is expected to add if no attribute has it: its results show which."""

_NORMALIZE_EPS = 1e-12
"""The least Euclidean norm by which torch.nn.functional.normalize divides."""

_FREE_WIDTHS = (8, 12)
"""The widths of the samples for a norm that has neither parameters nor a declared width."""

_PLAIN = (bool, int, float, str, tuple, list, torch.dtype, torch.device, type(None))
"""Types of the attributes that an instance of a norm may have besides its parameters."""

_NORM_FUNCTIONS = frozenset({"layer_norm", "rms_norm", "group_norm", "instance_norm"})


@dataclass(frozen=True)
class ProbedNorm:
    """A norm that was determined from the results of a module's forward.

    Attributes:
        formula: what the module computes.
        eps_name: the name of the module's attribute that is added under the root; None if the code has eps.
        eps: the number that was added.
        ranks: the numbers of axes of x for which the module computes that.
        width: the length of the rows of a module without parameters; None if any length is possible, or if the
            parameters have it.
        result_dtypes: the dtypes that the module returns; autocast_dtypes: the same under CUDA's autocast.
        returns_channels_last: whether y has its channels last in memory for a contiguous x.
    """

    formula: NormFormula
    eps_name: str | None
    eps: float
    ranks: frozenset[int]
    width: int | None
    result_dtypes: Dtypes
    autocast_dtypes: Dtypes
    returns_channels_last: bool


@dataclass(frozen=True)
class RecognisedNorm:
    """Result of `recognise_norm` for a module that can be patched: the operation that computes it.

    Attributes:
        operation: layer_norm, rms_norm, group_norm or instance_norm.
        probed: the properties of a module that is recognised only by its results.
        class_name: the name of that module's class.
    """

    operation: str
    probed: ProbedNorm | None = None
    class_name: str = ""

    @property
    def description(self) -> str:
        """The operation's name, for a report, followed by a probed module's options and class."""
        return self.operation if self.probed is None else f"{self.probed.formula}, as {self.class_name} has it"


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
    if kind.__module__.startswith("torch."):
        raise UnpatchableModuleError(f"no kernel for {kind.__name__}")
    return _recognise_by_results(module)


def _looks_like_norm(module: nn.Module) -> bool:
    """Return whether a module is one of torch's norms, or its class is named like a norm.

    A module that is only named like a norm must not contain another one, or a layer with parameters.
    """
    if isinstance(module, tuple(_OF_TORCH)):
        return True
    inner = list(module.modules())[1:]
    return _is_named_norm(module) and not any(_is_named_norm(each) or each._parameters for each in inner)


def _is_named_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _find_called_norm(module: nn.Module) -> str | None:
    """Find the name of a norm function that a module's forward calls; None if it calls none.

    The names are those in the forward's code; one that is also the name of a submodule is ignored, and so are all
    in code that names fusednorm, whose functions have these names.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = code.co_names if code else ()
    for name in _NORM_FUNCTIONS.intersection(() if "fusednorm" in names else names):
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


def _recognise_instance_norm(module: Any) -> RecognisedNorm:
    """Check the statistics, shapes and eps of a torch.nn.InstanceNorm, and return its `RecognisedNorm`.

    Raises:
        UnpatchableModuleError: no kernel supports them, or the class has its own method for the norm.
    """
    kind = type(module)
    for method in ("_apply_instance_norm", "_handle_no_batch_input"):
        if getattr(kind, method) is not getattr(_InstanceNorm, method):
            raise UnpatchableModuleError(f"{kind.__name__} replaces torch's {method}")
    if not module.num_features:
        raise UnpatchableModuleError(f"{kind.__name__} has no number of channels yet")
    if module.track_running_stats:
        raise UnpatchableModuleError(f"{kind.__name__} keeps running statistics, which no kernel does")
    for name in ("weight", "bias"):
        _check_parameter(name, getattr(module, name, None), (module.num_features,))
    _check_eps(module.eps)
    return RecognisedNorm("instance_norm")


_OF_TORCH: dict[type[nn.Module], Callable[[Any], RecognisedNorm]] = {
    nn.LayerNorm: _recognise_layer_norm,
    nn.RMSNorm: _recognise_rms_norm,
    nn.GroupNorm: _recognise_group_norm,
    _InstanceNorm: _recognise_instance_norm,
}


def _recognise_by_results(module: Any) -> RecognisedNorm:
    """Recognise a norm of any class by its results on random data.

    Raises:
        UnpatchableModuleError: the module computes no norm of this library, or has attributes that might change
            its results.
    """
    _check_arguments(module)
    activation = _check_attributes(module)
    weight_name, bias_name = _find_parameter_names(module)
    if isinstance(module, nn.GroupNorm):
        _recognise_group_norm(module)
    of_class = _PROBED.setdefault(type(module), {})
    state = _describe_state(module)
    if state not in of_class:
        # In inference mode, tensors have neither gradients nor versions, which are compared.
        with torch.inference_mode(False):
            of_class[state] = _probe_norm(module, weight_name, bias_name, activation)
    return RecognisedNorm(of_class[state].formula.operation, of_class[state], type(module).__name__)


_PROBED: WeakKeyDictionary[type[nn.Module], dict[tuple[Any, ...], ProbedNorm]] = WeakKeyDictionary()
"""The norms that were determined before, by their classes and states: a model has many of one kind."""


def _describe_state(module: nn.Module) -> tuple[Any, ...]:
    """Describe all that the results of a module with known attributes depend on, besides its parameters' values."""
    attributes = [(name, repr(value)) for name, value in vars(module).items() if name not in OF_EVERY_MODULE]
    shapes = [(name, None if each is None else each.shape) for name, each in module._parameters.items()]
    children = [(name, type(child)) for name, child in module._modules.items()]
    forward = ref(type(module).forward)
    return forward, module.training, find_inner_activation(module), *attributes, *shapes, *children


def _probe_norm(
    module: Any, weight_name: str | None, bias_name: str | None, activation: ActivationOptions
) -> ProbedNorm:
    """Determine a norm from its results on random data.

    Raises:
        UnpatchableModuleError: the module computes no norm of this library.
    """
    name = type(module).__name__
    sizes: list[tuple[int, ...]]
    if isinstance(module, nn.GroupNorm):
        sizes, width = [(module.num_channels,)], None
        formulas = [NormFormula("group_norm", weight_name, bias_name, 0.0, activation, module.num_groups)]
    else:
        sizes, width = _find_sizes(module, weight_name, bias_name)
        formulas = list(iterate_row_formulas(weight_name, bias_name, activation))
    eps_name = next((each for each in _EPS_NAMES if _is_number(module.__dict__.get(each))), None)
    has_parameters = weight_name is not None or bias_name is not None
    for eps, least_scale in _iterate_eps(module, eps_name, sizes[0][-1] if has_parameters else None):
        _check_eps(eps)
        probes = ProbeSet(module, sizes, eps, module.training, least_scale)
        found = {formula: probes.find_matching_probes(formula) for formula in formulas}
        if changed := probes.find_change():
            raise UnpatchableModuleError(f"{name} changes its {changed} when it is called")
        # With two axes the last one is dim 1, so the other ranks decide.
        formula = max(found, key=lambda each: len(found[each]))
        if ranks := found[formula]:
            # A forward with dropout of its own, for example, computes the formula in one mode alone.
            other_mode = ProbeSet(module, sizes, eps, not module.training, least_scale)
            if other_mode.find_matching_probes(formula).keys() != ranks.keys():
                raise UnpatchableModuleError(f"{name} computes something else in training than in evaluation")
            _check_matching_probes(module, formula, ranks, sizes)
            probe = next(iter(ranks.values()))
            dtypes = probe.find_result_dtypes(formula), probe.find_autocast_dtypes(formula)
            moves = formula.layout is not None and probe.returns_channels_last()
            return ProbedNorm(formula, eps_name, eps, frozenset(ranks), width, *dtypes, moves)
    if error := probes.find_error():
        raise UnpatchableModuleError(f"its forward of a few random samples raised {error}")
    raise UnpatchableModuleError(f"{name} computes {_join_alternatives(formulas)}")


def _iterate_eps(module: nn.Module, eps_name: str | None, cols: int | None) -> Iterator[tuple[float, float | None]]:
    """Yield each eps that a norm may add, with the scale of samples that show it; None for the default.

    The last is for norms by torch.nn.functional.normalize with rows of `cols` columns.  They divide by the larger
    of the Euclidean norm and 1e-12, so that rms_norm with eps 1e-24 / cols differs only near rows of norm 1e-12:
    by 29 % there, and by less than 1e-6 for norms of less than 1e-15 or more than 1e-9, of which zero is one.
    """
    if eps_name is not None:
        yield getattr(module, eps_name), None
        return
    for eps in _EPS_CONSTANTS:
        yield eps, None
    if cols is not None:
        yield _NORMALIZE_EPS**2 / cols, 1e-3 * _NORMALIZE_EPS / math.sqrt(cols)


def _check_matching_probes(
    module: nn.Module, formula: NormFormula, probes: dict[int, ForwardProbe], sizes: list[tuple[int, ...]]
) -> None:
    """Check that a module computes a formula for all strides and sizes of x, and that its gradients are the same.

    Args:
        module: the module.
        formula: a formula with which the results of the probes agree.
        probes: a probe for each rank of x.
        sizes: the shapes over which the norm has, or could have, parameters.

    Raises:
        UnpatchableModuleError: it does not, or cannot be run without data.
    """
    name = type(module).__name__
    for rank, probe in probes.items():
        if not probe.matches_strides(formula):
            raise UnpatchableModuleError(f"{name} computes something else for an x that is not contiguous")
        if not probe.matches_gradients(formula):
            raise UnpatchableModuleError(f"{name} has other gradients than {formula.operation}")
        for size in sizes:
            try:
                shape = find_deciding_shape(module, formula, rank, size, module.training)
            # The forward of an unknown class may raise anything.
            except Exception as error:
                raise UnpatchableModuleError(f"its forward without data raised {type(error).__name__}") from error
            if shape is not None:
                raise UnpatchableModuleError(f"{name} chooses its steps by the sizes of x, as for {list(shape)}")


def _check_arguments(module: nn.Module) -> None:
    """Raise UnpatchableModuleError if the forward of a module's class needs more than x, or takes a gate."""
    others = list(inspect.signature(type(module).forward).parameters.values())[2:]
    gates = [each.name for each in others if "gate" in each.name]
    if gates:
        raise UnpatchableModuleError(f"{type(module).__name__} multiplies by {gates[0]}, which no kernel does")
    needed = [
        each.name
        for each in others
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        raise UnpatchableModuleError(
            f"the forward of {type(module).__name__} needs more than x: {', '.join(needed)}"
        )


def _check_attributes(module: nn.Module) -> ActivationOptions:
    """Check that a module has nothing of which its results may depend unnoticed; return its activation.

    Raises:
        UnpatchableModuleError: it has buffers, or submodules or attributes that are not known.
    """
    name = type(module).__name__
    if "running_var" in module._buffers:
        raise UnpatchableModuleError(f"{name} normalises by running statistics")
    if module._buffers:
        raise UnpatchableModuleError(f"{name} has the buffer {next(iter(module._buffers))}, which is unknown")
    activation = find_inner_activation(module)
    if activation is None:
        kinds = dict.fromkeys(type(child).__name__ for child in module.children() if type(child) is not nn.Identity)
        raise UnpatchableModuleError(f"{name} contains {', '.join(kinds)}, which is unknown")
    for key, value in vars(module).items():
        if key not in OF_EVERY_MODULE and not isinstance(value, _PLAIN):
            raise UnpatchableModuleError(f"{name} has {key}, which is unknown")
    return activation


def _find_parameter_names(module: nn.Module) -> tuple[str | None, str | None]:
    """Find the names of a norm's weight and bias, each None if there is none, and check the parameters.

    Raises:
        UnpatchableModuleError: there is another parameter, or the kernels do not support one.
    """
    parameters = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
    weight_name, bias_name = (
        next((each for each in names if each in parameters), None) for names in (_WEIGHT_NAMES, _BIAS_NAMES)
    )
    for key, parameter in parameters.items():
        if key not in (weight_name, bias_name):
            raise UnpatchableModuleError(f"{type(module).__name__} has the parameter {key}, which is unknown")
        _check_parameter(key, parameter, tuple(parameter.shape))
    return weight_name, bias_name


def _find_sizes(
    module: nn.Module, weight_name: str | None, bias_name: str | None
) -> tuple[list[tuple[int, ...]], int | None]:
    """Find the shape of a norm's parameters, or the shapes that they could have; several if any width is possible.

    A parameter [heads, cols] has a row for each head; one of [cols, 1, 1] counts as [cols].  Also return the width
    that rows of a module without parameters must have, or None.

    Raises:
        UnpatchableModuleError: rows extend over several axes, or the parameters' shapes are none or two of these.
    """
    declared = module.__dict__.get("normalized_shape")
    if isinstance(declared, int):
        declared = (declared,)
    if declared is not None and len(declared) != 1:
        raise UnpatchableModuleError(f"normalized_shape {list(declared)} is of several axes")
    shapes = {
        name: _drop_unit_axes(tuple(getattr(module, name).shape))
        for name in (weight_name, bias_name)
        if name is not None
    }
    sizes = list(dict.fromkeys(shapes.values()))
    for name, size in shapes.items():
        if not 1 <= len(size) <= 2:
            raise UnpatchableModuleError(f"its {name} is {list(size)}: expected [cols] or [heads, cols]")
    if len(sizes) > 1:
        described = " and ".join(f"its {name} {list(size)}" for name, size in shapes.items())
        raise UnpatchableModuleError(f"{described} are of two shapes")
    if sizes:
        return sizes, None
    if declared is not None:
        return [tuple(declared)], declared[0]
    return [(width,) for width in _FREE_WIDTHS], None


def _drop_unit_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return [cols] for a shape of three or more axes with one size other than 1, as [cols, 1, 1]."""
    others = tuple(size for size in shape if size != 1)
    return others if len(shape) > 2 and len(others) == 1 else shape


def _join_alternatives(formulas: list[NormFormula]) -> str:
    """Return the words for a module that computes none of the formulas: "neither rms_norm nor layer_norm"."""
    operations = list(dict.fromkeys(formula.operation for formula in formulas))
    return (
        f"neither {operations[0]} nor {operations[1]}" if operations[1:] else f"something else than {operations[0]}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
