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

from normserve.memory.host_segments import HostSegment
from normserve.memory.slabs import Bytes

log = logging.getLogger(__name__)


class PinnedArray(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """An array in pinned host memory, with the device's view of the same bytes.

    Attributes:
        device_tensor: the same bytes as a tensor of the device, for as long as the memory exists.
        calls: launches on parts of that tensor, kept for repeated launches; they are freed with the memory.
        registration: registers the memory with the driver, if the driver did not allocate it.
    """

    device_tensor: Tensor
    calls: dict[Any, Any]
    registration: "HostMemoryRegistration | None" = None

    def view_tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """View bytes from `start` on as a contiguous tensor of the device."""
        return self.device_tensor[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def allocate_pinned(nbytes: int) -> Bytes:
    """Allocate pinned host memory for a slab, which kernels of the current device can access.

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
    """Make an allocator of slab memory that other processes can map, and that is pinned for the current device.

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


def try_register_memory(memory: memoryview) -> "HostMemoryRegistration | None":
    """Pin host memory by registering it with the driver, so that its copies are asynchronous and as fast
    as the bus.

    None, with a warning, if the driver refuses: copies then go through the driver's own memory.
    """
    try:
        return HostMemoryRegistration(memory)
    except RuntimeError as error:
        log.warning("shared memory of %d bytes is not pinned: %s", len(memory), error)
        return None


class HostMemoryRegistration:
    """A registration of host memory with the driver, which ends with this object; the memory must stay
    mapped until then.
    """

    #: The length in bytes of each registration, by its address.
    nbytes_by_address: ClassVar[dict[int, int]] = {}
    _address: int | None = None

    def __init__(self, memory: memoryview) -> None:
        """Raises: RuntimeError: the driver refuses."""
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0))
        self._address = address
        self.nbytes_by_address[address] = len(memory)

    def __del__(self) -> None:
        if self._address is not None:
            del self.nbytes_by_address[self._address]
            torch.cuda.cudart().cudaHostUnregister(self._address)


def is_registered(memory: memoryview) -> bool:
    """Return whether kernels can read and write this host memory: it must be within a `HostMemoryRegistration`."""
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    # A copy: other threads register and unregister memory.
    ranges = tuple(HostMemoryRegistration.nbytes_by_address.items())
    return any(start <= begin and begin + len(memory) <= start + nbytes for start, nbytes in ranges)


def view_on_device(memory: memoryview) -> Tensor:
    """View registered memory as bytes of the device; the tensor keeps the memory mapped."""
    return torch.as_tensor(_CudaArrayView(torch.frombuffer(memory, dtype=torch.uint8)), device="cuda")


def attach_device_view(host: Tensor, on_device: Tensor) -> PinnedArray:
    """Return a host tensor's memory as a flat `PinnedArray`, whose view on the device is `on_device`."""
    memory = host.numpy().view(PinnedArray)
    memory.device_tensor, memory.calls = on_device, {}
    return memory


class _CudaArrayView:
    """An object with a host tensor's address and size in the CUDA array interface, from which torch makes
    a device tensor.
    """

    def __init__(self, pinned: Tensor) -> None:
        self._memory = pinned
        self.__cuda_array_interface__ = {
            "shape": (pinned.nbytes,),
            "typestr": "|u1",
            "data": (pinned.data_ptr(), False),
            "version": 2,
        }
