"""Tensors of torch as those that the server keeps in the host's memory, and back."""

import torch
from normserve.memory.tensors import DType, HostTensor

DTYPES = {torch.float32: DType.FLOAT32, torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16}
_WITH_FLOAT8 = {**DTYPES, torch.float8_e4m3fn: DType.FLOAT8_E4M3FN}


def host(tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> HostTensor:
    """A copy in row-major order, in memory of its own, in the tensor's shape or another of as many elements."""
    data = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return HostTensor(DTYPES[tensor.dtype], tuple(tensor.shape if shape is None else shape), memoryview(data))


def back(tensor: HostTensor) -> torch.Tensor:
    """A copy."""
    dtype = {value: key for key, value in _WITH_FLOAT8.items()}[tensor.dtype]
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)
