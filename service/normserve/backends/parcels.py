"""A batch's tensors as few pieces of host memory, so that as few copies bring them to a device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from normserve.backends.tensors import PARAMETERS, rows_of, view
from normserve.jobs import Batch
from normserve.slabs import SlabPool

# A job alone is packed up to here: its tensors' copies would take longer to start than to run, and a body that came
# with its header does not lie in a slab.
_PACKED_BYTES = 256 * 1024
# Kernels want tensors at multiples of 16 bytes; whole cache lines keep neighbours apart.
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Parcel:
    """Tensors by name, each a piece of one of `buffers`.

    Attributes:
        buffers: what is to be copied.
        places: for each name its buffer's index, its first byte in that, dtype and shape.
    """

    buffers: list[Tensor]
    places: dict[str, tuple[int, int, torch.dtype, torch.Size]]

    def brought(self, bring: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The tensors where `bring` takes the buffers."""
        there = [bring(buffer) for buffer in self.buffers]
        return {
            name: _piece(there[index], start, dtype, shape)
            for name, (index, start, dtype, shape) in self.places.items()
        }


def parcel_of(batch: Batch, slabs: SlabPool) -> Parcel:
    """The batch's tensors, of one name one after another.

    Small ones are gathered in a slab; large ones of a single job stay where they lie.
    """
    parts = {name: _parts(batch, name) for name in batch.jobs[0].tensors}
    if len(batch.jobs) == 1 and batch.nbytes > _PACKED_BYTES:
        alone = {name: part for name, (part,) in parts.items()}
        places = {name: (index, 0, part.dtype, part.shape) for index, (name, part) in enumerate(alone.items())}
        return Parcel(list(alone.values()), places)
    shapes = {
        name: torch.Size((sum(len(part) for part in these), *these[0].shape[1:])) for name, these in parts.items()
    }
    buffer, offsets = room_for({name: (these[0].dtype, shapes[name]) for name, these in parts.items()}, slabs)
    for name, these in parts.items():
        start = offsets[name]
        for part in these:
            _piece(buffer, start, part.dtype, part.shape).copy_(part)
            start += part.nbytes
    places = {name: (0, offsets[name], these[0].dtype, shapes[name]) for name, these in parts.items()}
    return Parcel([buffer], places)


def room_for(
    tensors: Mapping[str, tuple[torch.dtype, torch.Size]], slabs: SlabPool
) -> tuple[Tensor, dict[str, int]]:
    """A slab as bytes for tensors of these dtypes and shapes, and where in it each begins."""
    offsets, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        offsets[name] = end
        end += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    end = max(end, _ALIGNMENT)
    return torch.frombuffer(slabs.take(end)[:end], dtype=torch.uint8), offsets


def collected(outputs: Mapping[str, Tensor], slabs: SlabPool) -> dict[str, Tensor]:
    """Copies of the tensors in one slab; from a device, they are complete when its stream has come so far."""
    buffer, offsets = room_for({name: (tensor.dtype, tensor.shape) for name, tensor in outputs.items()}, slabs)
    return {
        name: _piece(buffer, offsets[name], tensor.dtype, tensor.shape).copy_(tensor, non_blocking=True)
        for name, tensor in outputs.items()
    }


def _parts(batch: Batch, name: str) -> list[Tensor]:
    return [view(batch.jobs[0].tensors[name])] if name in PARAMETERS else rows_of(batch, name)


def _piece(buffer: Tensor, start: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if buffer.dtype == dtype and buffer.shape == shape:
        return buffer
    return buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
