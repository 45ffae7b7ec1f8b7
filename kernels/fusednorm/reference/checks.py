"""The input contract of `reference`: floats (including float64) of any strides, in the shapes of the contract.

Nothing is broadcast and integers are not converted, so that calls which the kernels reject are rejected here too.
"""

import torch
from torch import Tensor

from fusednorm.arguments.checks import check_shape
from fusednorm.errors import KernelInputError
from fusednorm.tensors.arrays import FLOAT8, FLOAT_DTYPES, check_tensors

DTYPES = (*FLOAT_DTYPES, torch.float64)
PRECISIONS = (torch.float32, torch.float64)


def check_float(name: str, tensor: Tensor) -> None:
    """Raise KernelInputError unless the argument is a tensor of float32, float16, bfloat16 or float64."""
    check_tensors((name,), (tensor,))
    if tensor.dtype not in DTYPES:
        raise KernelInputError(f"{name} must be float32, float16, bfloat16 or float64, got {tensor.dtype}")


def check_optional_tensor(
    name: str, tensor: Tensor | None, x: Tensor, shape: tuple[int, ...] | None = None
) -> None:
    """Raise KernelInputError unless a tensor is None, or a float tensor of `shape` on x's device.

    `shape` is None for x's shape.
    """
    if tensor is None:
        return
    check_float(name, tensor)
    if tensor.device != x.device:
        raise KernelInputError(f"{name} must be on x's device {x.device}, got {tensor.device}")
    if shape is not None:
        check_shape(name, tensor, shape, x)
    elif tensor.shape != x.shape:
        raise KernelInputError(f"{name} must have x's shape {list(x.shape)}, got {list(tensor.shape)}")


def check_result_dtype(out_dtype: torch.dtype | None, *, float8: bool) -> None:
    """Raise KernelInputError unless out_dtype is None, a float dtype or, with `float8`, float8_e4m3fn."""
    if out_dtype is None or out_dtype in DTYPES or (float8 and out_dtype == FLOAT8):
        return
    allowed = "float32, float16, bfloat16, float64 or float8_e4m3fn" if float8 else "float32, float16 or bfloat16"
    raise KernelInputError(f"out_dtype must be {allowed}, got {out_dtype}")


def check_precision(precision: torch.dtype | None) -> None:
    """Raise KernelInputError unless `precision` is a dtype for sums, or None."""
    if precision is not None and precision not in PRECISIONS:
        raise KernelInputError(f"precision must be float32 or float64, got {precision}")
