"""Pinned host memory that kernels access directly over the bus.

Pinned memory has the same address on the device as on the host (CUDA's unified virtual addressing), so it can be
used as a device tensor in any kernel.
"""

import logging
from collections.abc import Callable
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from normserve.memory.segments import HostSegment
from normserve.memory.slabs import Bytes

log = logging.getLogger(__name__)


class PinnedArray(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Memory of the host, and what the device sees of it.

    Attributes:
        device_tensor: the same bytes as a tensor of the device, for as long as the memory is there.
        calls: launches on parts of that tensor, kept for repeated launches; they are freed with the memory.
        registration: what has the driver know it, of memory that the driver did not make.
    """

    device_tensor: Tensor
    calls: dict[Any, Any]
    registration: "HostMemoryRegistration | None" = None

    def view_tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A contiguous tensor of the device from byte `start` on."""
        return self.device_tensor[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def allocate_pinned(nbytes: int) -> Bytes:
    """New memory for a slab, seen by the current device.

    Raises:
        MemoryError: the host has no more to pin.
    """
    try:
        pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        # CUDA reports it like an error of the device, which it is not.
        raise MemoryError(f"{nbytes} bytes cannot be pinned") from error
    # The caller may be in inference mode; the memory outlives that.
    with torch.inference_mode(False):
        return attach_device_view(pinned, torch.as_tensor(_CudaArrayView(pinned), device="cuda"))


def make_pinned_allocator(segment: Callable[[int], HostSegment]) -> Callable[[int], Bytes]:
    """What makes memory for a slab that other processes map as well, seen by the current device.

    Args: segment: makes the memory that is shared.
    """

    def allocate(nbytes: int) -> Bytes:
        memory = memoryview(segment(nbytes))[:nbytes]
        try:
            registration = HostMemoryRegistration(memory)
        except RuntimeError as error:
            raise MemoryError(f"{nbytes} bytes cannot be pinned") from error
        host = torch.frombuffer(memory, dtype=torch.uint8)
        with torch.inference_mode(False):
            pinned = attach_device_view(host, torch.as_tensor(_CudaArrayView(host), device="cuda"))
        pinned.registration = registration
        return pinned

    return allocate


def register_memory(memory: memoryview) -> "HostMemoryRegistration | None":
    """Memory of the host that the driver knows, so that copies of it are asynchronous and as quick as the bus.

    None where the driver refuses: copies of it are made by way of the driver's own memory.
    """
    try:
        return HostMemoryRegistration(memory)
    except RuntimeError as error:
        log.warning("shared memory of %d bytes is not pinned: %s", len(memory), error)
        return None


class HostMemoryRegistration:
    """Known to the driver for as long as this lives, which must be no longer than the memory is mapped."""

    #: Of all that there are, the bytes from each address on.
    known: ClassVar[dict[int, int]] = {}
    _address: int | None = None

    def __init__(self, memory: memoryview) -> None:
        """Raises: RuntimeError: the driver refuses."""
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0))
        self._address = address
        self.known[address] = len(memory)

    def __del__(self) -> None:
        if self._address is not None:
            del self.known[self._address]
            torch.cuda.cudart().cudaHostUnregister(self._address)


def is_registered(memory: memoryview) -> bool:
    """Whether kernels can read and write this memory of the host: it is within a `HostMemoryRegistration`."""
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    # Of a copy: memory comes and goes on any thread.
    known = tuple(HostMemoryRegistration.known.items())
    return any(start <= begin and begin + len(memory) <= start + nbytes for start, nbytes in known)


def view_on_device(memory: memoryview) -> Tensor:
    """Registered memory as bytes of the device; the tensor keeps the memory mapped."""
    return torch.as_tensor(_CudaArrayView(torch.frombuffer(memory, dtype=torch.uint8)), device="cuda")


def attach_device_view(host: Tensor, on_device: Tensor) -> PinnedArray:
    """A tensor's memory, flat, that is `on_device` to the device."""
    memory = host.numpy().view(PinnedArray)
    memory.device_tensor, memory.calls = on_device, {}
    return memory


class _CudaArrayView:
    """Says to torch, as libraries on CUDA tell one another, where an array lies."""

    def __init__(self, pinned: Tensor) -> None:
        self._memory = pinned
        self.__cuda_array_interface__ = {
            "shape": (pinned.nbytes,),
            "typestr": "|u1",
            "data": (pinned.data_ptr(), False),
            "version": 2,
        }
