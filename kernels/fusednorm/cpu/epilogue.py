"""Activations and their derivatives in place, by torch's kernels; an element's bits do not depend on its position.

torch's kernels compute two vector registers of elements at once.  The last elements of a tensor, or of a thread's
share, that do not fill these are computed by other instructions, and rounded otherwise.  So these functions pass
multiples only, and have the same bits in the library and in the server, which promises that a row has the same bits
whatever the other rows of its batch are.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fusednorm.cpu.chunks import split_range
from fusednorm.cpu.dropout_mask import DropoutMask

_VECTOR_ELEMENTS = 32
"""float32 elements in two AVX-512 registers; a multiple of the number in smaller registers, and of float64."""

_UNDIVIDED_ELEMENTS = 16 * 1024
"""The most elements that torch does not divide among threads."""

_GRAIN_ELEMENTS = 32 * 1024
"""Elements per thread: torch uses one more thread for each further such part; gelu uses all threads."""

_BLOCK_ELEMENTS = 128 * 1024
"""Elements per thread in a block; the intermediates of a block stay in the cache."""

# gelu_tanh(z) = z / (1 + exp(-z * (gain + cubic_gain * z^2))).  This takes half the time of torch's own or less,
# which has a tanh, except for a few thousand elements.
_CUBIC_GAIN = 0.044715 * 2.0 * math.sqrt(2.0 / math.pi)
_GAIN = torch.tensor(2.0 * math.sqrt(2.0 / math.pi), dtype=torch.float64, device="cpu")

_aten: Any = torch.ops.aten

_ACTIVATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "relu": lambda z, _: torch.relu_(z),
    "leaky_relu": lambda z, negative_slope: F.leaky_relu(z, negative_slope, inplace=True),
    "silu": lambda z, _: F.silu(z, inplace=True),
    "gelu": lambda z, _: F.gelu(z, out=z),  # type: ignore[call-arg]
    "gelu_tanh": lambda z, _: z.mul_(torch.addcmul(_GAIN, z, z, value=_CUBIC_GAIN).mul_(z).sigmoid_()),
}
_DERIVATIVES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "relu": lambda z, dy, _: _aten.threshold_backward.grad_input(dy, z, 0, grad_input=z),
    "leaky_relu": lambda z, dy, negative_slope: _aten.leaky_relu_backward.grad_input(
        dy, z, negative_slope, False, grad_input=z
    ),
    "silu": lambda z, dy, _: _aten.silu_backward.grad_input(dy, z, grad_input=z),
    "gelu": lambda z, dy, _: _aten.gelu_backward.grad_input(dy, z, grad_input=z),
    "gelu_tanh": lambda z, dy, _: _aten.gelu_backward.grad_input(dy, z, approximate="tanh", grad_input=z),
}


def activate_(z: Tensor, activation: str, negative_slope: float) -> Tensor:
    """Apply an activation to z in z's memory, and return z.

    Args:
        z: float32 or float64, in memory of its own without gaps.
    """
    if activation != "none":
        function = _ACTIVATIONS[activation]
        _compute_in_vectors(lambda z: function(z, negative_slope), z)
    return z


def backpropagate_activation_into_z_(dy: Tensor, z: Tensor, activation: str, negative_slope: float) -> Tensor:
    """Compute the gradient of z, dy * act'(z), in z's memory, and return z.

    Args:
        dy: like z, in z's memory order without gaps.
        z: float32 or float64, in memory of its own without gaps.
        activation: not "none".
    """
    derivative = _DERIVATIVES[activation]
    _compute_in_vectors(lambda z, dy: derivative(z, dy, negative_slope), z, dy)
    return z


def apply_epilogue_(
    z: Tensor,
    activation: str,
    negative_slope: float,
    dropout: DropoutMask | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute dropout(act(z)) in z's memory, and return z.

    Args:
        z: float32, contiguous.
        mask: dropout's mask of z, bool.
    """
    if activation == "none" and dropout is None:
        return z
    activate_(z, activation, negative_slope)
    if dropout is not None and mask is not None:
        flat = z.view(-1)
        for part in split_range(z.numel()):
            flat[part].mul_(dropout.compute_factors(mask.view(-1)[part]))
    return z


def backpropagate_epilogue(
    dy: Tensor,
    z: Tensor,
    activation: str,
    negative_slope: float,
    dropout: DropoutMask | None = None,
    mask: Tensor | None = None,
    *,
    overwrites_z: bool,
) -> Tensor:
    """Compute dz, the gradient of z in dropout(act(z)), in float32: dz = dy * keep / (1 - p) * act'(z).

    Without dropout and activation, the result is dy itself if dy is float32.

    Args:
        dy, z: contiguous; z in float32.
        mask: dropout's mask of z, bool.
        overwrites_z: whether dz may be written to z's memory.
    """
    if activation == "none" and dropout is None:
        return dy.float()
    dz = z if overwrites_z else z.clone()
    flat_dy, flat_dz = dy.view(-1), dz.view(-1)
    for part in split_range(z.numel()):
        gradient = flat_dy[part].float()
        if dropout is not None and mask is not None:
            gradient = gradient * dropout.compute_factors(mask.view(-1)[part])
        if activation == "none":
            flat_dz[part] = gradient
        else:
            backpropagate_activation_into_z_(gradient, flat_dz[part], activation, negative_slope)
    return dz


def _compute_in_vectors(function: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Overwrite the first tensor with an elementwise function of all tensors.  An element's bits do not depend on
    its position.

    torch rounds the last elements, which do not fill its vector registers, differently.  So the function is
    called with multiples of a vector only, and the last elements are padded.
    """
    count = tensors[0].numel()
    rest, threads = count % _VECTOR_ELEMENTS, torch.get_num_threads()
    if not rest and count <= (_BLOCK_ELEMENTS if threads == 1 else _UNDIVIDED_ELEMENTS):
        function(*tensors)
        return
    flat = [tensor.as_strided((count,), (1,)) for tensor in tensors]
    for block in _iterate_vector_aligned_blocks(count - rest, threads):
        function(*[tensor[block] for tensor in flat])
    if rest:
        padded = [tensor.new_zeros(_VECTOR_ELEMENTS) for tensor in flat]
        for vectors, tensor in zip(padded, flat, strict=True):
            vectors[:rest] = tensor[-rest:]
        flat[0][-rest:] = function(*padded)[:rest]


def _iterate_vector_aligned_blocks(count: int, threads: int) -> Iterator[slice]:
    """Yield blocks of elements.  When torch divides a block among its threads, each thread gets whole vectors.

    A vector has `_VECTOR_ELEMENTS` elements; `count` is a multiple of this number.
    """
    start, unit = 0, _VECTOR_ELEMENTS * threads
    while start < count:
        size = min(count - start, _BLOCK_ELEMENTS * threads)
        if threads > 1 and size > _UNDIVIDED_ELEMENTS:
            size -= size % unit
            while size % (_VECTOR_ELEMENTS * min(threads, math.ceil(size / _GRAIN_ELEMENTS))):
                size -= unit
            size = size or _UNDIVIDED_ELEMENTS
        yield slice(start, start + size)
        start += size
