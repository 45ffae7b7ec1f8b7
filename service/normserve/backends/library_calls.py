"""From a spec and its tensors to a call of a kernel library."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from fusednorm.results import Backward, Forward
from torch import Tensor

from normserve.backends.tensor_conversion import TORCH_DTYPES, move_channels_first
from normserve.codec.api_names import OF_SAMPLES, PARAMETERS, count_norms
from normserve.jobs.chain_layers import ChainParameters
from normserve.jobs.job import ChannelLayout, NormSpec, Op, PassDirection, list_options
from normserve.jobs.result_specs import compute_statistics_shape
from normserve.memory.tensors import DType

_API_NAMES = {"y_scale": "scale"}
"""The library's results that have another name in the API."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ResidentParameters:
    """A registered layer's parameters in the memory that kernels read; freed with the last reference."""

    weight: Tensor
    bias: Tensor | None
    by_name: Mapping[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        both = {"weight": self.weight, "bias": self.bias}
        object.__setattr__(self, "by_name", {name: each for name, each in both.items() if each is not None})


def collect_parameters(resident: object) -> Mapping[str, Tensor]:
    """Return the parameters of a layer, or of a chain of layers, by their names in the API."""
    if isinstance(resident, ChainParameters):
        return {
            f"{name}.{norm}": tensor
            for norm, each in enumerate(resident.layer_parameters)
            for name, tensor in collect_parameters(each).items()
        }
    assert isinstance(resident, ResidentParameters)
    return resident.by_name


def run_operation(
    library: ModuleType,
    spec: NormSpec,
    tensors: Mapping[str, Tensor],
    library_arguments: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Call the library's function for an operation, and return the results by name.

    An input without elements has its results made here, without a call.

    Args:
        library: has the functions of `fusednorm`, on the tensors' device.
        tensors: by their names in the API; samples as [B, C, *spatial].
        library_arguments: further arguments of this library's function.

    Returns:
        The operation's results, by their names in the API.
    """
    if not tensors["x"].numel():
        return _make_zero_row_results(spec, tensors)
    result: Forward | Backward = bind_operation(library, spec, tensors, library_arguments)()
    outputs = name_results(result)
    if outputs.get("dresidual") is outputs.get("dx"):
        # One tensor is one result, the gradient of both.
        outputs.pop("dresidual", None)
    return outputs


def name_results(result: Forward | Backward) -> dict[str, Tensor]:
    """Return the library's results by their names in the API."""
    named = zip(result._fields, result, strict=True)
    return {_API_NAMES.get(name, name): tensor for name, tensor in named if tensor is not None}


def bind_operation(
    library: ModuleType, spec: NormSpec, tensors: Mapping[str, Tensor], library_arguments: Mapping[str, Any]
) -> functools.partial[Forward | Backward]:
    """Return a function that calls the library for an operation on these tensors, which are passed as they are."""
    function, leading, options = _find_function(library, spec)
    given: list[Any] = [tensors[name] for name in leading]
    if spec.op is Op.GROUP_NORM:
        given.append(spec.num_groups)
    named = {name: tensor for name, tensor in tensors.items() if name not in leading}
    return functools.partial(function, *given, **named, **options, **library_arguments)


def _call_chain(function: Callable[..., Tensor], x: Tensor, **given: Any) -> Forward | Backward:
    """Call the library's function for a chain of LayerNorms.  The arguments have the form that the library's other
    functions take.

    Parameters are given by name, as `weight.0`, and output tensors as a `Forward`.
    """
    norms = range(count_norms(given))
    weights, biases = ([given.pop(f"{name}.{norm}", None) for norm in norms] for name in PARAMETERS)
    if "out" in given:
        given["out"] = given["out"].y
    return Forward(function(x, weights, biases, **given))


def make_output_argument(spec: NormSpec, results: Mapping[str, Tensor]) -> Forward | Backward:
    """Convert tensors in payload order to the library's `out` argument, to which it writes its results."""
    fields = {name: field for field, name in _API_NAMES.items()}
    named = {fields.get(name, name): move_channels_first(spec, name, tensor) for name, tensor in results.items()}
    return Forward(**named) if spec.direction is PassDirection.FORWARD else Backward(**named)


@functools.lru_cache(maxsize=1024)
def _find_function(
    library: ModuleType, spec: NormSpec
) -> tuple[Callable[..., Forward | Backward], tuple[str, ...], Mapping[str, Any]]:
    """Find the library's function for an operation; return it with the names of its positional tensors and
    with its options.
    """
    options = {option.name: getattr(spec, option.name) for option in list_options(spec.op, spec.direction)}
    # GroupNorm's first argument beside tensors.
    options.pop("num_groups", None)
    # Samples are [B, C, *spatial] in either layout, which only functions that also take rows must know.
    options.pop("layout", None)
    if spec.is_over_channels:
        options["layout"] = ChannelLayout.NCHW.value
    if options.get("out_dtype") is not None:
        options["out_dtype"] = TORCH_DTYPES[options["out_dtype"]]
    if spec.op is Op.LAYER_NORM_CHAIN:
        return functools.partial(_call_chain, library.layer_norm_chain), ("x",), options
    function = getattr(library, f"{spec.op.value}_{spec.direction.value}")
    return function, ("dy", "x") if spec.direction is PassDirection.BACKWARD else ("x",), options


def _make_zero_row_results(spec: NormSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make the results of an input without rows: empty tensors, and zeros for sums over rows."""
    x, residual = tensors["x"], tensors.get("residual")
    # GroupNorm's sum has x's type.
    summed = x if residual is None or spec.op is Op.GROUP_NORM else residual
    if spec.direction is PassDirection.BACKWARD:
        sums = [name for name in (*PARAMETERS, *OF_SAMPLES) if name in tensors]
        gradients = {"dx": torch.empty_like(x), **{f"d{name}": torch.zeros_like(tensors[name]) for name in sums}}
        is_own = "gate" in tensors or summed.dtype != x.dtype
        return gradients | {"dresidual": torch.empty_like(summed)} if is_own else gradients
    outputs = {"y": torch.empty_like(x, dtype=None if spec.out_dtype is None else TORCH_DTYPES[spec.out_dtype])}
    if residual is not None:
        outputs["residual_out"] = torch.empty_like(x, dtype=summed.dtype)
    if spec.stats:
        shape = compute_statistics_shape(spec, tuple(x.shape))
        for name in ("rstd",) if spec.op is Op.RMS_NORM else ("mean", "rstd"):
            outputs[name] = x.new_empty(shape, dtype=torch.float32)
    if spec.out_dtype is DType.FLOAT8_E4M3FN:
        outputs["scale"] = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return outputs
