"""CUDA memory that two processes share: one creates it and passes a file descriptor, and both map it.

It uses the driver's virtual memory management.  Unlike handles of the older API, a descriptor cannot be guessed
and needs no common namespace, and mappings stay valid when the other process ends.  A mapping cannot be revoked.
"""

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

_S = TypeVar("_S", bound="DeviceSegment")

_OUT_OF_MEMORY = 2


class DeviceMemoryError(Exception):
    """The CUDA driver or its Python package is missing, or the driver refused a call."""


class DeviceMemoryFullError(DeviceMemoryError):
    """The device has no more memory."""


class ShareableDevice:
    """A CUDA device whose memory can be shared between processes.  Any thread may use it.

    Attributes:
        ordinal: index among the devices that this process sees, as in the driver and torch.
        driver: the functions of `cuda.bindings.driver`.
        uuid: 32 hexadecimal digits, the same in every process.
        granularity: segment sizes are multiples of so many bytes.
    """

    def __init__(self, ordinal: int, driver: Any = None) -> None:
        """Args: driver: has the functions of `cuda.bindings.driver`, which is the default.

        Raises:
            DeviceMemoryError: the device's memory cannot be shared as descriptors, or there is no such device.
        """
        self.driver = driver = _import_driver() if driver is None else driver
        self.ordinal = ordinal
        call_driver(driver.cuInit, 0)
        self._driver_device = call_driver(driver.cuDeviceGet, ordinal)
        attributes = driver.CUdevice_attribute
        for needed in (
            attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        ):
            if not call_driver(driver.cuDeviceGetAttribute, needed, self._driver_device):
                raise DeviceMemoryError("the device's memory cannot be handed over as a descriptor")
        self.uuid = _read_uuid(driver, self._driver_device)
        self._handle_type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(
            call_driver(driver.cuMemGetAllocationGranularity, self._make_allocation_properties(), smallest)
        )

    @classmethod
    def find_by_uuid(cls, uuid: str, driver: Any = None) -> "ShareableDevice":
        """Return the device of that UUID among the devices that this process sees.

        Raises:
            DeviceMemoryError: this process does not see the device, or its memory cannot be shared.
        """
        driver = _import_driver() if driver is None else driver
        call_driver(driver.cuInit, 0)
        for ordinal in range(call_driver(driver.cuDeviceGetCount)):
            if _read_uuid(driver, call_driver(driver.cuDeviceGet, ordinal)) == uuid:
                return cls(ordinal, driver)
        raise DeviceMemoryError("this process does not see the server's device")

    def allocate_zeroed(self, nbytes: int, kind: type[_S]) -> _S:
        """Allocate device memory that can be shared, map it into this process, and fill it with zeros.

        Args:
            nbytes: rounded up to the granularity.
            kind: `DeviceSegment`, or a subclass.

        Raises:
            DeviceMemoryFullError: the device has no more memory.
            DeviceMemoryError: the driver refuses.
        """
        nbytes = self.round_up(nbytes)
        handle = call_driver(self.driver.cuMemCreate, nbytes, self._make_allocation_properties(), 0)
        segment = self._map_handle(handle, nbytes, kind)
        self.zero_segment(segment)
        return segment

    def round_up(self, nbytes: int) -> int:
        """Round a size up to whole granules, at least one."""
        return max(1, -(-nbytes // self.granularity)) * self.granularity

    def zero_segment(self, segment: "DeviceSegment") -> None:
        """Overwrite a segment with zeros, and wait until that is complete."""
        driver = self.driver
        with self.use_context():
            call_driver(driver.cuMemsetD8, segment.address, 0, len(segment))
            # Only the stream of the memset: work on other streams need not be waited for.
            call_driver(driver.cuStreamSynchronize, 0)

    def export_descriptor(self, segment: "DeviceSegment") -> int:
        """Return a file descriptor of the segment for another process; the caller must close it.

        Raises:
            DeviceMemoryError: the driver refuses.
        """
        descriptor = int(
            call_driver(self.driver.cuMemExportToShareableHandle, segment.handle, self._handle_type, 0)
        )
        os.set_inheritable(descriptor, False)
        return descriptor

    def map_descriptor(self, descriptor: int, nbytes: int, kind: type[_S]) -> _S:
        """Map device memory that another process exported as a file descriptor, which the caller still has to
        close.

        Raises:
            DeviceMemoryError: the descriptor is of no such memory, or of another size.
        """
        handle = call_driver(self.driver.cuMemImportFromShareableHandle, descriptor, self._handle_type)
        return self._map_handle(handle, nbytes, kind)

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap memory that is not in use any more."""
        call_driver(self.driver.cuMemUnmap, address, nbytes)
        call_driver(self.driver.cuMemAddressFree, address, nbytes)

    def release_handle(self, handle: Any) -> None:
        """Release a memory handle; the memory is freed once nothing maps it."""
        call_driver(self.driver.cuMemRelease, handle)

    def _map_handle(self, handle: Any, nbytes: int, kind: type[_S]) -> _S:
        """Map the memory of a handle for reading and writing; release the handle if that fails."""
        driver = self.driver
        try:
            address = int(call_driver(driver.cuMemAddressReserve, nbytes, 0, 0, 0))
            try:
                call_driver(driver.cuMemMap, address, nbytes, 0, handle, 0)
                try:
                    call_driver(driver.cuMemSetAccess, address, nbytes, [self._make_access()], 1)
                except BaseException:
                    call_driver(driver.cuMemUnmap, address, nbytes)
                    raise
            except BaseException:
                call_driver(driver.cuMemAddressFree, address, nbytes)
                raise
        except BaseException:
            self.release_handle(handle)
            raise
        return kind(self, handle, address, nbytes)

    def _make_allocation_properties(self) -> Any:
        """Make the driver's properties of an allocation: on this device, and exportable as a file descriptor."""
        driver = self.driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return properties

    def _make_access(self) -> Any:
        """Make the driver's permission for this device to read and write a mapping."""
        driver = self.driver
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    @contextlib.contextmanager
    def use_context(self) -> Iterator[None]:
        """Make the device's primary context, which torch uses as well, current in this thread during the block."""
        call_driver(self.driver.cuCtxPushCurrent, self._primary_context)
        try:
            yield
        finally:
            call_driver(self.driver.cuCtxPopCurrent)

    @functools.cached_property
    def _primary_context(self) -> Any:
        return call_driver(self.driver.cuDevicePrimaryCtxRetain, self._driver_device)


class DeviceSegment:
    """A mapping of shared device memory, unmapped with the last reference to this object or to a view.

    Attributes:
        device: the device of the memory.
        handle: the driver's handle of the memory.
        address: of its first byte.
    """

    def __init__(self, device: ShareableDevice, handle: Any, address: int, nbytes: int) -> None:
        self.device, self.handle, self.address = device, handle, address
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes

    def view(self) -> memoryview:
        """Return a view of the entire segment, for code that passes memory on and does not read it."""
        return cast(memoryview, DeviceMemoryView(self, 0, self._nbytes))

    def __del__(self) -> None:
        # Of a device that has failed, or a driver that has ended, all is gone anyway.
        with contextlib.suppress(DeviceMemoryError):
            self.device.unmap(self.address, self._nbytes)
        with contextlib.suppress(DeviceMemoryError):
            self.device.release_handle(self.handle)


class DeviceMemoryView:
    """A range of a device segment's bytes, which keeps the segment mapped and can be sliced like a `memoryview`.

    The bytes cannot be read on the host.

    Attributes:
        obj: the segment.
    """

    __slots__ = ("__weakref__", "_start", "_stop", "obj")

    def __init__(self, segment: DeviceSegment, start: int, stop: int) -> None:
        """Args: start, stop: offsets in the segment."""
        self.obj = segment
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, piece: slice) -> "DeviceMemoryView":
        if not isinstance(piece, slice):
            raise TypeError("the bytes of a device's memory cannot be read one by one")
        start, stop, step = piece.indices(len(self))
        if step != 1:
            raise ValueError(f"a view of device memory must have step 1, got {step}")
        return DeviceMemoryView(self.obj, self._start + start, self._start + max(start, stop))

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The CUDA array interface of the view, as an array of uint8."""
        return {
            "shape": (len(self),),
            "typestr": "|u1",
            "data": (self.obj.address + self._start, False),
            "version": 2,
        }


@functools.cache
def _import_driver() -> Any:
    """Import the Python package of the CUDA driver, which is optional.

    Raises:
        DeviceMemoryError: the package is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise DeviceMemoryError("the package cuda-bindings is not installed") from None


def call_driver(function: Any, *arguments: Any) -> Any:
    """Call a driver function and return its first result; None if the function has no results.

    Raises:
        DeviceMemoryError: it fails.
    """
    values = call_driver_for_results(function, *arguments)
    return values[0] if values else None


def call_driver_for_results(function: Any, *arguments: Any) -> Sequence[Any]:
    """Call a driver function and return all its results but the error code.

    Raises:
        DeviceMemoryError: it fails.
    """
    try:
        code, *values = cast(Sequence[Any], function(*arguments))
    except RuntimeError as error:
        # The package is there and the driver's library is not, or lacks the function.
        raise DeviceMemoryError(str(error)) from None
    if int(code):
        kind = DeviceMemoryFullError if int(code) == _OUT_OF_MEMORY else DeviceMemoryError
        raise kind(f"{function.__name__} failed: {code}")
    return values


def _read_uuid(driver: Any, device: Any) -> str:
    # For a part of a device (MIG) the older function of this name returns the UUID of the entire device.
    tell = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    return bytes(call_driver(tell, device).bytes).hex()
