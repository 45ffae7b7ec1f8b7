"""The descriptions of tensors, with the checks that only tensors need: devices, and lazy negations."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusednorm.arguments import arrays
from fusednorm.arguments.arrays import Array
from fusednorm.arguments.checks import is_shape
from fusednorm.arguments.inputs import BackwardInputs, NormInputs
from fusednorm.devices.device_properties import INTERPRETED, GpuModel
from fusednorm.errors import KernelInputError
from fusednorm.tensors.devices import describe_device, is_absent_gpu

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in arrays.ITEMSIZES}
"""Torch's dtype of each name."""

FLOAT_DTYPES = tuple(TORCH_DTYPES[name] for name in arrays.FLOAT_DTYPES)
FLOAT8 = TORCH_DTYPES[arrays.FLOAT8]

_NAMES = {TORCH_DTYPES[name]: name for name in (*arrays.FLOAT_DTYPES, arrays.FLOAT8)}

Inputs = TypeVar("Inputs", NormInputs[Any], BackwardInputs[Any])


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype; if no kernel takes it, the name that torch prints."""
    return _NAMES.get(dtype) or str(dtype)


def check_tensors(names: Iterable[str], values: Iterable[object]) -> None:
    """Raise KernelInputError unless each argument of a call is a tensor, or None except for x and dy.

    The message says what to write for an array of another library, and for torch's normalized_shape.
    """
    for name, value in zip(names, values, strict=True):
        is_required = name in ("x", "dy")
        if isinstance(value, Tensor) or (value is None and not is_required):
            continue
        expected = "a torch tensor" if is_required else "a torch tensor or None"
        if name == "weight" and is_shape(value):
            raise KernelInputError(
                f"weight must be {expected}, got {value}: there is no normalized_shape before weight"
            )
        remedy = f": torch.from_dlpack({name}) makes one" if hasattr(value, "__dlpack__") else ""
        raise KernelInputError(f"{name} must be {expected}, got {type(value).__name__}{remedy}")


def is_misaligned(tensor: Tensor) -> bool:
    """Return whether a tensor's memory does not start at a multiple of 16 bytes."""
    return tensor.data_ptr() % 16 != 0


def describe_as_array(name: str, tensor: Tensor, device: GpuModel | None = None) -> Array:
    """Describe a tensor as an `Array` whose memory has the given name."""
    dtype = tensor.dtype
    device = device or describe_device(tensor.device)
    is_aligned = tensor.data_ptr() % 16 == 0
    name_of_dtype = _NAMES.get(dtype) or str(dtype)
    return Array(name, name_of_dtype, tensor.shape, tensor.stride(), device, tensor.is_contiguous(), is_aligned)


def describe_as_arrays(
    names: Iterable[str], tensors: Sequence[Tensor | None]
) -> tuple[list[Array | None], dict[str, Tensor]]:
    """Check the devices of a call's tensors, x first; return their descriptions, and the tensors by name.

    Raises:
        KernelInputError: an argument is no tensor; a tensor is not on x's device, or x's is no CUDA device; or a
            lazy negation (`torch.conj(z).imag`), whose memory holds values of the opposite sign.
    """
    names = tuple(names)
    check_tensors(names, tensors)
    x: Any = tensors[0]
    place = x.device
    if not x.is_cuda and not INTERPRETED and not is_absent_gpu(place):
        remedy = ": fusednorm.reference computes passes of CPU tensors" if x.is_cpu else ""
        raise KernelInputError(f"x must be on a CUDA device, got {place}{remedy}")
    device, index = describe_device(place), x.get_device()
    described: list[Array | None] = []
    named: dict[str, Tensor] = {}
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is None:
            described.append(None)
            continue
        if tensor.is_neg():
            raise KernelInputError(
                f"{name} is a lazily negated view: kernels read memory, so call resolve_neg() first"
            )
        # Tensors without an index may be on devices of different types.
        if tensor.get_device() != index or (index < 0 and tensor.device != place):
            raise KernelInputError(f"{name} must be on x's device {place}, got {tensor.device}")
        described.append(describe_as_array(name, tensor, device))
        named[name] = tensor
    return described, named


def describe_inputs(inputs: Inputs) -> tuple[Inputs, dict[str, Tensor]]:
    """Check the devices of a call's inputs; return their descriptions, and the tensors by name.

    Raises:
        KernelInputError: as in `describe_as_arrays`.
    """
    described, named = describe_as_arrays(inputs._fields, inputs)
    arrays: Inputs = type(inputs)(*described)
    return arrays, named
