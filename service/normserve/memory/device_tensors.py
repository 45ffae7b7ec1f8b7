"""Tensors in device memory."""

from normserve.memory.host_tensors import HostTensor


class DeviceTensor(HostTensor):
    """A contiguous, row-major tensor in the memory of a device.

    It differs from a `HostTensor` by `data`, a `DeviceMemoryView`, which has a length and keeps the memory alive.
    Code that takes it for host memory gets a TypeError.
    """

    __slots__ = ()
