"""CUDA runtime allocations that a process shares with another process by an IPC handle.

A handle has 64 bytes.  Any process with the handle may open it while the allocating process lives.  Freeing memory
that another process has open is undefined behaviour, so a process that shares memory must keep it.  Virtual
mappings (including expandable segments) and the driver's pools have no handles.
"""

import contextlib
import ctypes
import logging
from typing import TypeVar

from normserve.memory.device_segments import (
    DeviceMemoryError,
    DeviceSegment,
    ShareableDevice,
    call_driver,
    call_driver_for_results,
)
from normserve.memory.thread_allocation import make_unretained_on_thread

log = logging.getLogger(__name__)

_A = TypeVar("_A", bound="IpcAllocation")

HANDLE_BYTES = 64

# The only way to open one that the driver knows.
_LAZY_PEER_ACCESS = 1


class IpcAllocation(DeviceSegment):
    """A mapping of another process's CUDA allocation, closed with the last reference to this object or to
    a view.
    """

    def __init__(self, device: ShareableDevice, address: int, nbytes: int) -> None:
        super().__init__(device, None, address, nbytes)

    def __del__(self) -> None:
        # Of a device that has failed, or a driver that has ended, all is gone anyway.
        with contextlib.suppress(DeviceMemoryError), self.device.use_context():
            call_driver(self.device.driver.cuIpcCloseMemHandle, self.address)


def open_allocation(device: ShareableDevice, handle: bytes, nbytes: int, kind: type[_A]) -> _A:
    """Map another process's CUDA allocation by its IPC handle, and check its device and size.

    Args:
        handle: `HANDLE_BYTES` bytes.
        nbytes: the allocation's size as stated by the other process.
        kind: `IpcAllocation`, or a subclass.

    Raises:
        ValueError: the handle has another length; or the memory has fewer bytes, or is on another
            device.
        DeviceMemoryError: this process cannot open the handle.
    """
    driver = device.driver
    if len(handle) != HANDLE_BYTES:
        raise ValueError(f"the handle must have {HANDLE_BYTES} bytes, got {len(handle)}")
    # Its field has no name in every version of cuda.bindings.
    ipc_handle = driver.CUipcMemHandle()
    ctypes.memmove(ipc_handle.getPtr(), handle, HANDLE_BYTES)
    with device.use_context():
        address = int(call_driver(driver.cuIpcOpenMemHandle, ipc_handle, _LAZY_PEER_ACCESS))
        try:
            base, extent = (int(each) for each in call_driver_for_results(driver.cuMemGetAddressRange, address))
            ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
            if int(call_driver(driver.cuPointerGetAttribute, ordinal, address)) != device.ordinal:
                raise ValueError("the memory must be on the server's device, it is on another")
            # Python's numbers do not wrap.
            if not 0 < nbytes <= base + extent - address:
                raise ValueError(f"the memory must have the {nbytes} bytes that are stated, it has fewer")
            return kind(device, address, nbytes)
        except BaseException:
            with contextlib.suppress(DeviceMemoryError):
                call_driver(driver.cuIpcCloseMemHandle, address)
            raise


async def open_allocation_on_thread(device: ShareableDevice, handle: bytes, nbytes: int, kind: type[_A]) -> _A:
    """Map a client's CUDA allocation by its IPC handle, in a thread so that the event loop does not wait.

    Raises:
        ValueError: the handle cannot be opened; the message is for the client.
    """
    try:
        # It takes the driver half a millisecond, which others shall not wait.
        return await make_unretained_on_thread(open_allocation, device, handle, nbytes, kind)
    except DeviceMemoryError as error:
        # The text alone: an error's frames hold the device's.
        log.warning("a client's memory cannot be opened: %s", str(error))
        raise ValueError("the handle must be of memory that the server can open") from None
