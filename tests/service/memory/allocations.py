"""The client's side of a shared allocation of CUDA's runtime: its handle, for a server to open."""

import ctypes
from typing import NamedTuple

from normserve.memory.device_segments import ShareableDevice, call_driver, call_driver_for_results
from normserve.memory.ipc_allocations import HANDLE_BYTES


class Allocation(NamedTuple):
    """What a pointer points into.

    Attributes:
        address: of its first byte.
        handle: `HANDLE_BYTES` for the process that is to open it.
    """

    address: int
    nbytes: int
    handle: bytes


def allocation_of(device: ShareableDevice, address: int) -> Allocation:
    """The whole allocation that an address lies in, for another process to open."""
    driver = device.driver
    with device.use_context():
        base, nbytes = (int(each) for each in call_driver_for_results(driver.cuMemGetAddressRange, address))
        handle = call_driver(driver.cuIpcGetMemHandle, base)
    return Allocation(base, nbytes, ctypes.string_at(handle.getPtr(), HANDLE_BYTES))
