"""CUDA tensors of torch as arguments: copied to host memory only for transports that need it."""

import sys
from typing import Any

from normserve.memory.tensors import DType, HostTensor


class TorchCudaTensor(HostTensor):
    """A tensor in the memory of a CUDA device.

    Attributes:
        view_tensor: torch's, of any strides.
        data: the tensor's bytes in host memory, copied there at the first access.
    """

    __slots__ = ("_copy", "view_tensor")

    view_tensor: Any
    _copy: memoryview | None

    def __init__(self, dtype: DType, tensor: Any) -> None:
        for name, value in (("dtype", dtype), ("shape", tuple(tensor.shape)), ("fortran_order", False)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "view_tensor", tensor)
        object.__setattr__(self, "_copy", None)

    @property
    def data(self) -> memoryview:
        copy = self._copy
        if copy is None:
            copy = copy_to_host_bytes(self.view_tensor)
            object.__setattr__(self, "_copy", copy)
        return copy


def copy_to_host_bytes(tensor: Any) -> memoryview:
    """Return a tensor's bytes in row-major order, copied unless the tensor is contiguous in host memory."""
    torch: Any = sys.modules["torch"]
    flat = tensor.detach().resolve_neg().cpu().contiguous().reshape(-1)
    seen: memoryview = flat.view(torch.uint8).numpy().data
    return seen
