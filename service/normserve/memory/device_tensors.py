"""Tensors in device memory."""

from normserve.memory.host_tensors import HostTensor


class DeviceTensor(HostTensor):
    """A contiguous, row-major tensor in the memory of a device.

    All of it is a `HostTensor`'s but for `data`, a `DeviceBytes`: it tells how many bytes there are and keeps them,
    and code that takes it for host memory gets a TypeError.
    """

    __slots__ = ()
