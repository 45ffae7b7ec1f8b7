"""The driver's functions for shared device memory, as `cuda.bindings.driver` has them, on files in host memory.

What any handle or mapping has stays there, as on a device: `bytes_in_use` counts it.
"""

import ctypes
import mmap
import os
from types import SimpleNamespace
from typing import ClassVar

GRANULARITY = 2**21
TOTAL = 64 * GRANULARITY

_names = iter(range(1, 2**62))
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10


def _map(address: int | None, nbytes: int, descriptor: int | None) -> int:
    """Map a file, or nothing that may be touched, there or anywhere."""
    fixed = _MAP_FIXED if address else 0
    if descriptor is None:
        return _libc.mmap(address, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1, 0)
    return _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, descriptor, 0)


def bytes_at(address: int, nbytes: int) -> ctypes.Array:
    """What is mapped there."""
    return (ctypes.c_char * nbytes).from_address(address)


class Memory:
    """What was allocated, known by the inode of its file."""

    of_inode: ClassVar["dict[int, Memory]"] = {}

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        """Args: descriptor: of what another process has allocated."""
        self.descriptor = os.memfd_create("device") if descriptor is None else os.dup(descriptor)
        if descriptor is None:
            # Memory comes as it was left.
            os.write(self.descriptor, b"\xa5" * nbytes)
        self.nbytes = nbytes
        self.users = 0
        self.of_inode[os.fstat(self.descriptor).st_ino] = self

    def let_go(self) -> None:
        self.users -= 1
        if not self.users:
            del self.of_inode[os.fstat(self.descriptor).st_ino]
            os.close(self.descriptor)


class Allocation:
    """What the runtime has allocated, as a file that other processes of the user find by its process's number."""

    def __init__(self, descriptor: int, *, device: int = 0) -> None:
        self.descriptor = descriptor
        self.nbytes = os.fstat(descriptor).st_size
        self.address = _map(None, self.nbytes, descriptor)
        self.device = device

    def unmap(self) -> None:
        _libc.munmap(self.address, self.nbytes)
        os.close(self.descriptor)


class IpcHandle:
    """64 bytes, at the address that `getPtr` returns."""

    def __init__(self) -> None:
        self.content = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self.content)


class FakeDriver:
    """One process's driver, which sees devices of these UUIDs.

    Attributes:
        calls: the names of the functions that were called, in order.
        refusals: for the name of a function, the code that it answers.
    """

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=103,
    )
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUpointer_attribute = SimpleNamespace(
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=9,
    )
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, *uuids: bytes) -> None:
        self._uuids = uuids or (b"u" * 16,)
        self.calls: list[str] = []
        self.refusals: dict[str, int] = {}
        self.handles: dict[int, Memory] = {}
        self.reserved: dict[int, int] = {}
        self.mappings: dict[int, Memory] = {}
        self.accessible: set[int] = set()
        self.attribute = 1
        # Of the runtime's allocations, this process's own by their addresses, and how often each other's is open.
        self.allocations: dict[int, Allocation] = {}
        self.opened: dict[int, Allocation] = {}
        self.opens: dict[int, int] = {}

    def __getattribute__(self, name: str):
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found
        self.calls.append(name)
        if name in self.refusals:

            def refuse(*_: object) -> tuple[int, None]:
                return self.refusals[name], None

            return refuse
        return found

    @property
    def bytes_in_use(self) -> int:
        return sum(memory.nbytes for memory in Memory.of_inode.values())

    def content(self, address: int) -> ctypes.Array:
        """What is mapped there, as kernels see it."""
        assert address in self.accessible
        return bytes_at(address, self.mappings[address].nbytes)

    def CUmemAllocationProp(self):  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    def CUmemAccessDesc(self):  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace())

    def cuInit(self, flags):  # noqa: N802
        return (0,)

    def cuDeviceGetCount(self):  # noqa: N802
        return 0, len(self._uuids)

    def cuDeviceGet(self, ordinal):  # noqa: N802
        return (0, ordinal) if ordinal < len(self._uuids) else (101, None)

    def cuDeviceGetUuid(self, device):  # noqa: N802
        return 0, SimpleNamespace(bytes=self._uuids[device])

    def cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        return 0, self.attribute

    def cuMemGetAllocationGranularity(self, properties, option):  # noqa: N802
        assert properties.requestedHandleTypes == 1
        return 0, GRANULARITY

    def cuMemCreate(self, nbytes, properties, flags):  # noqa: N802
        assert not nbytes % GRANULARITY
        if self.bytes_in_use + nbytes > TOTAL:
            return 2, None
        return 0, self._handle(Memory(nbytes))

    def cuMemRelease(self, handle):  # noqa: N802
        self.handles.pop(handle).let_go()
        return (0,)

    def cuMemExportToShareableHandle(self, handle, kind, flags):  # noqa: N802
        return 0, os.dup(self.handles[handle].descriptor)

    def cuMemImportFromShareableHandle(self, descriptor, kind):  # noqa: N802
        told = os.fstat(descriptor)
        memory = Memory.of_inode.get(told.st_ino)
        if memory is None and (not told.st_size or told.st_size % GRANULARITY):
            return 999, None
        return 0, self._handle(memory or Memory(told.st_size, descriptor))

    def cuMemAddressReserve(self, nbytes, alignment, address, flags):  # noqa: N802
        found = _map(None, nbytes, None)
        self.reserved[found] = nbytes
        return 0, found

    def cuMemAddressFree(self, address, nbytes):  # noqa: N802
        assert address not in self.mappings
        assert self.reserved.pop(address) == nbytes
        _libc.munmap(address, nbytes)
        return (0,)

    def cuMemMap(self, address, nbytes, offset, handle, flags):  # noqa: N802
        memory = self.handles[handle]
        if memory.nbytes != nbytes:
            return (1,)
        memory.users += 1
        self.mappings[address] = memory
        assert _map(address, nbytes, memory.descriptor) == address
        return (0,)

    def cuMemSetAccess(self, address, nbytes, descriptions, count):  # noqa: N802
        self.accessible.add(address)
        return (0,)

    def cuMemUnmap(self, address, nbytes):  # noqa: N802
        self.accessible.discard(address)
        self.mappings.pop(address).let_go()
        _map(address, nbytes, None)
        return (0,)

    def cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        return 0, "context"

    def cuCtxPushCurrent(self, context):  # noqa: N802
        return (0,)

    def cuCtxPopCurrent(self):  # noqa: N802
        return 0, "context"

    def cuMemsetD8(self, address, value, nbytes):  # noqa: N802
        ctypes.memset(address, value, nbytes)
        return (0,)

    def cuStreamSynchronize(self, stream):  # noqa: N802
        return (0,)

    def allocate(self, nbytes: int, **options: bool) -> int:
        """Memory as `cudaMalloc` gives it: its address."""
        descriptor = os.memfd_create("allocation")
        os.ftruncate(descriptor, nbytes)
        made = Allocation(descriptor, **options)
        self.allocations[made.address] = made
        return made.address

    def free(self, address: int) -> None:
        """As `cudaFree`."""
        self.allocations.pop(address).unmap()

    def CUipcMemHandle(self):  # noqa: N802
        return IpcHandle()

    def cuIpcGetMemHandle(self, address):  # noqa: N802
        found = self.allocations.get(address)
        if found is None:
            return 1, None
        handle = self.CUipcMemHandle()
        handle.content.raw = (b"%d %d" % (os.getpid(), found.descriptor)).ljust(64, b"\0")
        return 0, handle

    def cuIpcOpenMemHandle(self, handle, flags):  # noqa: N802
        assert flags == 1
        try:
            pid, number = map(int, handle.content.raw.rstrip(b"\0").split())
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except (ValueError, OSError):
            return 1, None
        inode = os.fstat(descriptor).st_ino
        for address, each in self.opened.items():
            # The same mapping for whoever opens it again, as the driver does.
            if os.fstat(each.descriptor).st_ino == inode:
                os.close(descriptor)
                self.opens[address] += 1
                return 0, address
        opened = Allocation(descriptor)
        self.opened[opened.address] = opened
        self.opens[opened.address] = 1
        return 0, opened.address

    def cuIpcCloseMemHandle(self, address):  # noqa: N802
        self.opens[address] -= 1
        if not self.opens[address]:
            del self.opens[address]
            self.opened.pop(address).unmap()
        return (0,)

    def cuMemGetAddressRange(self, address):  # noqa: N802
        found = self._allocation_at(address)
        return (1, None, None) if found is None else (0, found.address, found.nbytes)

    def cuPointerGetAttribute(self, attribute, address):  # noqa: N802
        found = self._allocation_at(address)
        if found is None:
            return 1, None
        return 0, {9: found.device}[attribute]

    def _allocation_at(self, address: int) -> Allocation | None:
        for each in (*self.allocations.values(), *self.opened.values()):
            if each.address <= address < each.address + each.nbytes:
                return each
        return None

    def _handle(self, memory: Memory) -> int:
        memory.users += 1
        name = next(_names)
        self.handles[name] = memory
        return name
