"""The kinds of memory that a connection shares with the server, each with the arrays that lie in it."""

import ctypes
import sys
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, Protocol

import numpy as np

from normserve.client.calls import arrays
from normserve.client.calls.on_device import TorchCudaTensor
from normserve.client.local.arena import ArenaBlock, HostArena
from normserve.client.local.device import BusyStream, DeviceArena
from normserve.codec.local_frames import SegmentRange
from normserve.memory.host_tensors import DType, HostTensor

# Of others numpy finds the name slowly.
_NUMPY = frozenset([np.dtype("<f4"), np.dtype("<f2")])

# Elements of a torch tensor that numpy has no type for are counted in one of their size.
_SIZED: dict[DType, np.dtype[Any]] = {DType.BFLOAT16: np.dtype("<i2"), DType.FLOAT8_E4M3FN: np.dtype("u1")}


class AllocatedBlock(Protocol):
    """A block.

    Attributes:
        place: its segment, offset and bytes.
    """

    place: SegmentRange


class SharedArrayMemory(Protocol):
    """Shared memory, and one kind of arrays in it."""

    def described(self, value: Any) -> tuple[Hashable, ...]:
        """The place, dtype and shape of an array; () of what is not of this kind, or whose bytes are not as sent.

        The place is None where the array lies elsewhere, and must be copied.
        """

    def located(self, tensor: HostTensor) -> tuple[int, int] | None:
        """The segment and the offset of a call's tensor; None where it lies elsewhere."""

    def take_all(self, sizes: Sequence[int]) -> Sequence[AllocatedBlock] | None:
        """A block of at least so many bytes for each of several sizes; None where there is no space for all."""

    def take_at(self, places: Sequence[SegmentRange]) -> Sequence[AllocatedBlock] | None:
        """A block at each of several places where blocks were before; None where one of them is in use."""

    def maker(self, dtype: DType, shape: tuple[int, ...]) -> Callable[[Any], Any]:
        """What makes an array of at least one element for the caller in a block, which the array keeps."""

    def target(self, dtype: DType, shape: tuple[int, ...], place: SegmentRange) -> Any:
        """What `copy` copies to at a place, which it does not keep; of at least one element."""

    def copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Copy arrays that lie elsewhere, whose bytes follow one another."""

    def busy(self) -> BusyStream | None:
        """What must end before the server may read what the caller has written, if anything."""


class _HostArrayMemory:
    """Memory of the host."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self.take_all, self.take_at = arena.take_all, arena.take_at

    def located(self, tensor: HostTensor) -> tuple[int, int] | None:
        return self._arena.locate(tensor.data)

    def target(self, dtype: DType, shape: tuple[int, ...], place: SegmentRange) -> tuple[int, int]:
        return self._arena.address(place), prod(shape) * dtype.itemsize

    def busy(self) -> None:
        return None


class NumpyArrayMemory(_HostArrayMemory):
    """Memory of the host with numpy's arrays."""

    def described(self, value: Any) -> tuple[Hashable, ...]:
        if type(value) is not np.ndarray or not value.flags.c_contiguous:
            return ()
        dtype = value.dtype
        if dtype not in _NUMPY:
            return ()
        return self._arena.locate_address(arrays.get_address(value)), dtype, value.shape

    def copy(self, targets: Sequence[tuple[int, int]], sources: Sequence[Any]) -> None:
        for (address, nbytes), source in zip(targets, sources, strict=True):
            ctypes.memmove(address, arrays.get_address(source), nbytes)

    def maker(self, dtype: DType, shape: tuple[int, ...]) -> Callable[[ArenaBlock], Any]:
        of_numpy = arrays.get_numpy_dtype(dtype)
        return lambda block: np.ndarray(shape, of_numpy, block)


class TorchArrayMemory(_HostArrayMemory):
    """Memory of the host with torch's tensors."""

    def __init__(self, arena: HostArena) -> None:
        super().__init__(arena)
        torch: Any = sys.modules["torch"]
        self._torch = torch
        self._types = frozenset([torch.Tensor, torch.nn.Parameter])

    def described(self, value: Any) -> tuple[Hashable, ...]:
        if type(value) not in self._types or not value.is_cpu or value.is_neg() or not value.is_contiguous():
            return ()
        return self._arena.locate_address(value.data_ptr()), value.dtype, value.shape

    def copy(self, targets: Sequence[tuple[int, int]], sources: Sequence[Any]) -> None:
        for (address, nbytes), source in zip(targets, sources, strict=True):
            # Not by torch's threads, which take milliseconds where there are more of them than cores.
            ctypes.memmove(address, source.data_ptr(), nbytes)

    def maker(self, dtype: DType, shape: tuple[int, ...]) -> Callable[[ArenaBlock], Any]:
        # torch's own `frombuffer` knows no shape, and each view of a tensor takes as long as this.
        from_numpy = self._torch.from_numpy
        if dtype not in _SIZED:
            of_numpy = arrays.get_numpy_dtype(dtype)
            return lambda block: from_numpy(np.ndarray(shape, of_numpy, block))
        sized, of_torch = _SIZED[dtype], getattr(self._torch, dtype.label)
        return lambda block: from_numpy(np.ndarray(shape, sized, block)).view(of_torch)


class CudaArrayMemory:
    """Memory of a device with torch's tensors."""

    def __init__(self, arena: DeviceArena) -> None:
        self._arena = arena
        torch: Any = sys.modules["torch"]
        self._types = frozenset([torch.Tensor, torch.nn.Parameter])
        self.take_all, self.take_at = arena.take_all, arena.take_at
        self.maker = arena.maker
        self._copy_all = torch._foreach_copy_
        self.busy = arena.busy_stream

    def described(self, value: Any) -> tuple[Hashable, ...]:
        if type(value) not in self._types or not value.is_cuda or value.is_neg() or not value.is_contiguous():
            return ()
        place = self._arena.locate_address(value.data_ptr())
        # Tensors of another device never recur.
        if place is None and value.get_device() != self._arena.ordinal:
            return ()
        return place, value.dtype, value.shape

    def target(self, dtype: DType, shape: tuple[int, ...], place: SegmentRange) -> Any:
        return self._arena.view(place, dtype, shape)

    def copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        if len(targets) == 1:
            targets[0].copy_(sources[0].detach())
            return
        # In one launch, if they are of one type.
        self._copy_all(targets, [source.detach() for source in sources])

    def located(self, tensor: HostTensor) -> tuple[int, int] | None:
        return self._arena.locate_tensor(tensor.tensor) if isinstance(tensor, TorchCudaTensor) else None
