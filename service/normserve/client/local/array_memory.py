"""The kinds of memory that a connection shares with the server, each with its kind of arrays."""

import ctypes
import sys
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np

from normserve.client.calls import array_conversion
from normserve.client.calls.array_conversion import TorchCudaTensor
from normserve.client.local.allocator import ArenaBlock, HostArena
from normserve.client.local.device_arena import BusyStream, DeviceArena
from normserve.codec.local_messages import SegmentRange
from normserve.memory.tensors import DType, HostTensor

# Of others numpy finds the name slowly.
_NUMPY = frozenset([np.dtype("<f4"), np.dtype("<f2")])

# Elements of a torch tensor that numpy has no type for are counted in one of their size.
_SIZED: dict[DType, np.dtype[Any]] = {DType.BFLOAT16: np.dtype("<i2"), DType.FLOAT8_E4M3FN: np.dtype("u1")}


class AllocatedBlock(Protocol):
    """An allocated block of shared memory, of the host or of a device.

    Attributes:
        segment_range: the block's segment, offset and size.
    """

    segment_range: SegmentRange


class SharedArrayMemory(Protocol):
    """The interface of shared memory for one kind of arrays: numpy arrays, torch CPU tensors or CUDA tensors."""

    def make_signature_part(self, value: Any) -> tuple[Hashable, ...]:
        """Return the location, dtype and shape of an array, as a part of the key that identifies a repeated call.

        It is () for other values, and for arrays whose bytes in memory are not those that are sent.  The
        location is None where the array is outside shared memory, and must be copied.
        """

    def locate(self, tensor: HostTensor) -> tuple[int, int] | None:
        """Return the segment and the offset of a call's tensor; None where it is outside shared memory."""

    def allocate_all(self, sizes: Sequence[int]) -> Sequence[AllocatedBlock] | None:
        """Allocate a block of at least so many bytes for each size; return None where not all of them fit."""

    def allocate_at(self, places: Sequence[SegmentRange]) -> Sequence[AllocatedBlock] | None:
        """Allocate blocks at ranges of earlier blocks; return None where one of the ranges is in use."""

    def make_array_factory(self, dtype: DType, shape: tuple[int, ...]) -> Callable[[Any], Any]:
        """Return a function that makes an array of at least one element in a block; the array keeps the block."""

    def make_copy_target(self, dtype: DType, shape: tuple[int, ...], place: SegmentRange) -> Any:
        """Return `copy_or_enqueue_all`'s target for an array of at least one element, without keeping its range."""

    def copy_or_enqueue_all(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Copy contiguous arrays to their targets in shared memory; on a device, only queue the copies.

        Copies on a device are only queued on its current stream; `find_busy_stream` returns the stream to wait for.
        """

    def find_busy_stream(self) -> BusyStream | None:
        """Return the stream whose work must end before the server may read the caller's tensors, if any."""


class _HostArrayMemory:
    """The base class of `NumpyArrayMemory` and `TorchArrayMemory`, with the methods that do not differ between
    them.
    """

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self.allocate_all, self.allocate_at = arena.allocate_all, arena.allocate_at

    def locate(self, tensor: HostTensor) -> tuple[int, int] | None:
        return self._arena.locate(tensor.data)

    def make_copy_target(self, dtype: DType, shape: tuple[int, ...], place: SegmentRange) -> tuple[int, int]:
        return self._arena.get_address(place), prod(shape) * dtype.itemsize

    def find_busy_stream(self) -> None:
        return None


class NumpyArrayMemory(_HostArrayMemory):
    """Shared host memory for numpy arrays."""

    def make_signature_part(self, value: Any) -> tuple[Hashable, ...]:
        """Return the location, dtype and shape of a contiguous float32 or float16 array; () for any other value.

        The location is None outside shared memory.
        """
        if type(value) is not np.ndarray or not value.flags.c_contiguous:
            return ()
        dtype = value.dtype
        if dtype not in _NUMPY:
            return ()
        return self._arena.locate_address(array_conversion.get_address(value)), dtype, value.shape

    def copy_or_enqueue_all(self, targets: Sequence[tuple[int, int]], sources: Sequence[Any]) -> None:
        for (address, nbytes), source in zip(targets, sources, strict=True):
            ctypes.memmove(address, array_conversion.get_address(source), nbytes)

    def make_array_factory(self, dtype: DType, shape: tuple[int, ...]) -> Callable[[ArenaBlock], Any]:
        of_numpy = array_conversion.get_numpy_dtype(dtype)
        return lambda block: np.ndarray(shape, of_numpy, block)


class TorchArrayMemory(_HostArrayMemory):
    """Shared host memory for torch CPU tensors."""

    def __init__(self, arena: HostArena) -> None:
        super().__init__(arena)
        torch: Any = sys.modules["torch"]
        self._torch = torch
        self._types = frozenset([torch.Tensor, torch.nn.Parameter])

    def make_signature_part(self, value: Any) -> tuple[Hashable, ...]:
        """Return the location, dtype and shape of a contiguous CPU tensor; () for any other value.

        The location is None outside shared memory.
        """
        if type(value) not in self._types or not value.is_cpu or value.is_neg() or not value.is_contiguous():
            return ()
        return self._arena.locate_address(value.data_ptr()), value.dtype, value.shape

    def copy_or_enqueue_all(self, targets: Sequence[tuple[int, int]], sources: Sequence[Any]) -> None:
        for (address, nbytes), source in zip(targets, sources, strict=True):
            # Not by torch's threads, which take milliseconds where there are more of them than cores.
            ctypes.memmove(address, source.data_ptr(), nbytes)

    def make_array_factory(self, dtype: DType, shape: tuple[int, ...]) -> Callable[[ArenaBlock], Any]:
        """Return a function that makes a CPU tensor of this dtype and shape over a block.  The tensor keeps the
        block alive.

        bfloat16 and float8, which numpy lacks, are made as integers of the same size and viewed as the dtype.
        """
        # torch's own `frombuffer` knows no shape, and each view of a tensor takes as long as this.
        from_numpy = self._torch.from_numpy
        if dtype not in _SIZED:
            of_numpy = array_conversion.get_numpy_dtype(dtype)
            return lambda block: from_numpy(np.ndarray(shape, of_numpy, block))
        sized, of_torch = _SIZED[dtype], getattr(self._torch, dtype.label)
        return lambda block: from_numpy(np.ndarray(shape, sized, block)).view(of_torch)


class CudaArrayMemory:
    """The shared memory of one CUDA device, for torch tensors."""

    def __init__(self, arena: DeviceArena) -> None:
        self._arena = arena
        torch: Any = sys.modules["torch"]
        self._types = frozenset([torch.Tensor, torch.nn.Parameter])
        self.allocate_all, self.allocate_at = arena.allocate_all, arena.allocate_at
        self.make_array_factory = arena.make_tensor_factory
        self._copy_all = torch._foreach_copy_
        self.find_busy_stream = arena.find_busy_stream

    def make_signature_part(self, value: Any) -> tuple[Hashable, ...]:
        """Return the location, dtype and shape of a contiguous tensor of this device; () for any other value.

        The location is None outside shared memory.
        """
        if type(value) not in self._types or not value.is_cuda or value.is_neg() or not value.is_contiguous():
            return ()
        place = self._arena.locate_address(value.data_ptr())
        # Tensors of another device never recur.
        if place is None and value.get_device() != self._arena.ordinal:
            return ()
        return place, value.dtype, value.shape

    def make_copy_target(self, dtype: DType, shape: tuple[int, ...], place: SegmentRange) -> Any:
        return self._arena.make_unowned_tensor(place, dtype, shape)

    def copy_or_enqueue_all(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Queue copies of tensors to their targets in shared memory, with one launch for several tensors of one
        dtype.

        The copies are only queued on the current stream.
        """
        if len(targets) == 1:
            targets[0].copy_(sources[0].detach())
            return
        # In one launch, if they are of one type.
        self._copy_all(targets, [source.detach() for source in sources])

    def locate(self, tensor: HostTensor) -> tuple[int, int] | None:
        return self._arena.locate_tensor(tensor.view_tensor) if isinstance(tensor, TorchCudaTensor) else None
