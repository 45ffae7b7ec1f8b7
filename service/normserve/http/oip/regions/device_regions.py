"""Regions of CUDA shared memory: allocations of other processes on this host, opened by handle."""

import queue
from typing import Any

from normserve.admission.client_identity import ClientIdentity
from normserve.codec.local_messages import ALIGNMENT
from normserve.engine.engine import Engine
from normserve.errors import ForbiddenError, UnusableRegionError
from normserve.http.oip.regions.region import Kind
from normserve.ip_addresses import parse_ip_address
from normserve.memory.ipc_allocations import IpcAllocation, open_allocation_on_thread

OFF = "this server registers no CUDA shared memory; its operator can allow that with --oip-cuda-shared-memory"


class DeviceRegion(IpcAllocation):
    """A region of a client's CUDA memory, mapped while a registration, a request or a launch refers to it.

    Attributes:
        device_id: the client's number of the device.
        closed_sizes: receives the region's size once it is closed; a queue, because unlike a lock it is
            reentrant.
    """

    kind: Kind = "cuda"
    device_id = 0
    closed_sizes: "queue.SimpleQueue[int] | None" = None

    @property
    def start(self) -> int:
        """The address of the first byte."""
        return self.address

    @property
    def nbytes(self) -> int:
        """The region's size in bytes."""
        return len(self)

    def describe(self) -> dict[str, Any]:
        """Return the region's fields in the protocol, without its name."""
        return {"device_id": self.device_id, "byte_size": self.nbytes}

    def is_in_same_memory(self, other: object) -> bool:
        """Return whether addresses can be compared; an allocation that is opened repeatedly is mapped once."""
        return isinstance(other, DeviceRegion)

    def require_usable_range(self, offset: int, nbytes: int) -> None:
        """Require that the offset is aligned as kernels need.

        The length needs no check, because CUDA memory cannot shrink.

        Raises:
            UnusableRegionError: a tensor cannot begin at this offset.
        """
        if (self.address + offset) % ALIGNMENT:
            raise UnusableRegionError(
                f"the offset in a region of CUDA memory must be a multiple of {ALIGNMENT}, got {offset}"
            )

    def get_view(self, offset: int, nbytes: int) -> memoryview:
        """Return a view of a range of the region, which keeps the region mapped."""
        return self.view()[offset : offset + nbytes]

    def __del__(self) -> None:
        super().__del__()
        if self.closed_sizes is not None:
            self.closed_sizes.put(self.nbytes)


class DeviceRegionOpener:
    """Opens CUDA memory of clients on this host, if the settings allow that."""

    def __init__(self, is_allowed: bool, engine: Engine) -> None:
        """Args: is_allowed: whether the operator has enabled it."""
        self._is_allowed = is_allowed
        self._engine = engine

    @property
    def is_enabled(self) -> bool:
        """Whether regions may be registered; also false without a device, or before it has started."""
        engine = self._engine
        return self._is_allowed and engine.device_description is not None and engine.shareable_device is not None

    def require_local_client(self, caller: ClientIdentity) -> None:
        """Refuse a client that is not on this host, or every client if CUDA shared memory is disabled.

        Raises:
            UnusableRegionError: the server registers no CUDA memory.
            ForbiddenError: the client is connected over a network.
        """
        if not self._is_allowed:
            raise UnusableRegionError(OFF)
        if not is_local_address(caller.address):
            raise ForbiddenError("CUDA shared memory is for clients that come over loopback or a Unix socket")

    async def open_region(
        self, caller: ClientIdentity, handle: bytes, client_device_id: int, nbytes: int
    ) -> DeviceRegion:
        """Map a client's CUDA memory into this process by its IPC handle.

        Args:
            client_device_id: the client's number of the device, which may differ here: the handle identifies the
                device.
            nbytes: the memory's size according to the client.

        Raises:
            UnusableRegionError: there is no device whose memory can be opened, or this memory cannot be.
            ForbiddenError: the client is connected over a network.
            NotReadyError, DrainingError: the server is not ready.
        """
        self.require_local_client(caller)
        self._engine.require_ready()
        device = self._engine.shareable_device
        if device is None:
            raise UnusableRegionError("the server has no device whose memory could be registered")
        try:
            region = await open_allocation_on_thread(device, handle, nbytes, DeviceRegion)
        except ValueError as error:
            raise UnusableRegionError(str(error)) from None
        region.device_id = client_device_id
        return region


def is_local_address(address: str) -> bool:
    """Return whether a client's address is a loopback address or a Unix socket."""
    if address == "unix":
        return True
    try:
        return parse_ip_address(address).is_loopback
    except ValueError:
        return False
