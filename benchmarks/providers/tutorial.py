"""LayerNorm forward as in Triton's tutorial, in our own code: one program per row, one block per step.

A program reads its row three times, for the mean, for the variance and for the result; a row of one block comes
from cache after the first time.  The tutorial's backward pass is omitted: its programs add to shared partial sums
of dweight and dbias under a spin lock, which assumes that the holder of a lock makes progress while others spin.
It has hung an H200.

Source: https://triton-lang.org/main/getting-started/tutorials/05-layer-norm.html
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK_BYTES = 64 << 10


@triton.jit
def layer_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    stride_row,
    cols,
    eps,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0)
    x_row_ptr = x_ptr + row.to(tl.int64) * stride_row
    y_row_ptr = y_ptr + row.to(tl.int64) * stride_row
    offsets = tl.arange(0, BLOCK_N)

    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, cols, BLOCK_N):
        col = start + offsets
        total += tl.load(x_row_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / cols

    squares = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, cols, BLOCK_N):
        col = start + offsets
        x = tl.load(x_row_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        centred = tl.where(col < cols, x - mean, 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / cols + eps)

    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)

    for start in range(0, cols, BLOCK_N):
        col = start + offsets
        x = tl.load(x_row_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * weight + bias
        tl.store(y_row_ptr + col, y.to(y_ptr.dtype.element_ty), mask=col < cols)


def can_fit_block(x: Tensor) -> bool:
    """Whether a row of x [rows, cols] fits one block of 64 KB."""
    return int(triton.next_power_of_2(x.shape[1])) * x.element_size() <= MAX_BLOCK_BYTES


def layer_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """y of contiguous x [rows, cols], weight and bias [cols]; statistics are written for a backward pass."""
    rows, cols = x.shape
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    block_n = triton.next_power_of_2(cols)
    layer_norm_forward_kernel[(rows,)](
        x,
        weight,
        bias,
        y,
        mean,
        rstd,
        x.stride(0),
        cols,
        eps,
        BLOCK_N=block_n,
        num_warps=min(max(block_n // 256, 1), 8),
    )
    return y
