"""Tensors in device memory."""

from normserve.memory.tensors import HostTensor


class DeviceTensor(HostTensor):
    """A contiguous, row-major tensor in the memory of a device.

    All attributes are as in `HostTensor` except `data`, a `DeviceMemoryView`: it has a size and keeps the memory,
    and code that uses it as host memory gets a TypeError.
    """

    __slots__ = ()
