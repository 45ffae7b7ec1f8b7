"""The tensors of a batch in few pieces of host memory, so that few copies transfer them to a device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from normserve.backends.tensors import DTYPES, TORCH_DTYPES, shape_of, view
from normserve.codec.tensor_names import is_parameter
from normserve.jobs.job import Batch, NormJob
from normserve.jobs.results import Described
from normserve.memory.host_tensors import HostTensor
from normserve.memory.slabs import SlabPool

# Jobs are packed up to here: copies of their tensors would take longer to start than to run, and a body that came
# with its header does not lie in a slab.  What is longer the host would copy more slowly than the bus.
_PACKED_BYTES = 256 * 1024
# Kernels want tensors at multiples of 16 bytes; whole cache lines keep neighbours apart.
_ALIGNMENT = 128


Place = tuple[int, int, torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Tensors by name, each a piece of one of `buffers`.

    Attributes:
        buffers: what is to be copied: of each the parts, flat, that follow one another.
        places: for each name its buffer's index, its first byte in that, dtype and shape.
    """

    buffers: list[Sequence[Tensor]]
    places: dict[str, Place]

    def brought(self, bring: Callable[[Sequence[Tensor]], Tensor]) -> dict[str, Tensor]:
        """The tensors where `bring` takes the buffers."""
        there = [bring(buffer) for buffer in self.buffers]
        return {
            name: _piece(there[index], start, dtype, shape)
            for name, (index, start, dtype, shape) in self.places.items()
        }


@dataclass(frozen=True, slots=True)
class Bundle:
    """Results in one piece of a device's memory, so that one copy takes them home.

    Attributes:
        buffer: flat, of bytes.
        offsets: where in it each tensor begins.
        described: what each is.
    """

    buffer: Tensor
    offsets: Mapping[str, int]
    described: Described

    @classmethod
    def empty(cls, described: Described, device: str) -> "Bundle":
        """Memory for such results."""
        offsets, end = places_of(described)
        return cls(torch.empty(end, dtype=torch.uint8, device=device), offsets, described)

    def tensors(self) -> dict[str, Tensor]:
        """The results, where they are."""
        return {
            name: _piece(self.buffer, self.offsets[name], TORCH_DTYPES[dtype], shape)
            for name, (dtype, shape) in self.described.items()
        }

    def taken_home(self, slabs: SlabPool) -> dict[str, HostTensor]:
        """Copies in a slab; they are complete when the stream of the device has come so far."""
        slab = slabs.take(self.buffer.nbytes)[: self.buffer.nbytes]
        torch.frombuffer(slab, dtype=torch.uint8).copy_(self.buffer, non_blocking=True)
        return views(slab, self.offsets, self.described)


def is_packed(batch: Batch) -> bool:
    """Whether its tensors are gathered in a slab; those of large jobs stay where they lie."""
    return batch.nbytes <= _PACKED_BYTES * len(batch.jobs)


def parcel_of(batch: Batch, slabs: SlabPool) -> Parcel:
    """The batch's tensors, of one name one after another."""
    first = batch.jobs[0]
    rows = sum([job.rows for job in batch.jobs])
    wanted = {name: (tensor.dtype, shape_of(first, name, rows)) for name, tensor in first.tensors.items()}
    if not is_packed(batch):
        places: dict[str, Place] = {
            name: (index, 0, TORCH_DTYPES[dtype], shape)
            for index, (name, (dtype, shape)) in enumerate(wanted.items())
        }
        return Parcel([[_flat(job.tensors[name]) for job in _who_bring(batch, name)] for name in wanted], places)
    slab, offsets = room_for(wanted, slabs)
    pack(batch, slab, offsets)
    places = {name: (0, offsets[name], TORCH_DTYPES[dtype], shape) for name, (dtype, shape) in wanted.items()}
    return Parcel([[torch.frombuffer(slab, dtype=torch.uint8)]], places)


def pack(batch: Batch, slab: memoryview, offsets: Mapping[str, int]) -> None:
    """Write what came to a slab: from each name's offset on its tensors one after another, of parameters one."""
    for name in batch.jobs[0].tensors:
        start = offsets[name]
        for job in _who_bring(batch, name):
            data = _row_major(job.tensors[name])
            slab[start : start + len(data)] = data
            start += len(data)


def places_of(tensors: Described) -> tuple[dict[str, int], int]:
    """Where in a slab each of the tensors begins, and where the last one ends."""
    offsets, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        offsets[name] = end
        end += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def room_for(tensors: Described, slabs: SlabPool) -> tuple[memoryview, dict[str, int]]:
    """A slab for the tensors, and where in it each begins."""
    offsets, end = places_of(tensors)
    end = max(end, _ALIGNMENT)
    return slabs.take(end)[:end], offsets


def collected(outputs: Mapping[str, Tensor], slabs: SlabPool) -> dict[str, HostTensor]:
    """Copies of the tensors in one slab; from a device, they are complete when its stream has come so far."""
    described = {name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in outputs.items()}
    slab, offsets = room_for(described, slabs)
    for name, tensor in outputs.items():
        if tensor.numel():
            home = torch.frombuffer(slab, dtype=tensor.dtype, count=tensor.numel(), offset=offsets[name])
            home.copy_(tensor.reshape(-1), non_blocking=True)
    return views(slab, offsets, described)


def written(outputs: Mapping[str, Tensor], places: Mapping[str, memoryview]) -> dict[str, HostTensor]:
    """Copies of the tensors in their places; from a device, they are complete when its stream has come so far.

    Args: places: for each tensor memory of at least its bytes.
    """
    results = {}
    for name, tensor in outputs.items():
        place = places[name][: tensor.nbytes]
        if tensor.numel():
            torch.frombuffer(place, dtype=tensor.dtype).copy_(tensor.reshape(-1), non_blocking=True)
        results[name] = HostTensor(DTYPES[tensor.dtype], tuple(tensor.shape), place)
    return results


def at_places(
    places: Mapping[str, memoryview], tensors: Described, kind: type[HostTensor] = HostTensor
) -> dict[str, HostTensor]:
    """Tensors in memory of at least their bytes, of the device where `kind` is `DeviceTensor`."""
    return {
        name: kind(dtype, shape, places[name][: prod(shape) * dtype.itemsize])
        for name, (dtype, shape) in tensors.items()
    }


def views(slab: memoryview, offsets: Mapping[str, int], tensors: Described) -> dict[str, HostTensor]:
    """Tensors that lie in a slab, each from its offset on."""
    return {
        name: HostTensor(dtype, shape, slab[offsets[name] : offsets[name] + prod(shape) * dtype.itemsize])
        for name, (dtype, shape) in tensors.items()
    }


def _who_bring(batch: Batch, name: str) -> Sequence[NormJob]:
    """The jobs whose tensors of that name a launch reads: parameters are the same in all."""
    return batch.jobs[:1] if is_parameter(name) else batch.jobs


def _flat(tensor: HostTensor) -> Tensor:
    """A tensor's bytes, in row-major order."""
    data = _row_major(tensor)
    if not len(data):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8)


def _row_major(tensor: HostTensor) -> memoryview:
    """A tensor's bytes, in row-major order."""
    return view(tensor).reshape(-1).view(torch.uint8).numpy().data if tensor.fortran_order else tensor.data


def _piece(buffer: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
