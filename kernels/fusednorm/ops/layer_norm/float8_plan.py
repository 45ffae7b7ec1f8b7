"""The launch of a LayerNorm or RMSNorm forward pass into float8 over checked tensors."""

from torch import Tensor

from fusednorm.checks import Epilogue
from fusednorm.device import multiprocessor_count
from fusednorm.errors import UnsupportedShapeError
from fusednorm.integers import cdiv
from fusednorm.launch.launch import Launch, can_prefetch, dropout_arguments, vector_units
from fusednorm.ops.layer_norm.call import row_strides, shared_options
from fusednorm.ops.layer_norm.configs import ForwardSweep
from fusednorm.ops.layer_norm.float8 import (
    layer_norm_quantise_held_kernel,
    layer_norm_quantise_sweep_kernel,
)
from fusednorm.ops.layer_norm.float8_table import HELD_AHEAD_PER_SM, HeldRows, choose_held
from fusednorm.results import Forward

# Rows that are not held, by bytes of an element of x.  Two programs a multiprocessor, one of which reads while the
# other reduces, as long as all rows under way fit L2 with room to spare; then one.
_SWEPT: dict[int, tuple[tuple[int, ForwardSweep], ...]] = {
    2: ((65536, ForwardSweep(8192, num_warps=16, ahead_per_sm=1)), (2**31, ForwardSweep(16384, num_warps=32))),
    4: ((32768, ForwardSweep(4096, num_warps=16, ahead_per_sm=1)), (2**31, ForwardSweep(8192, num_warps=32))),
}


def plan_quantise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    epilogue: Epilogue,
    out: Forward,
    is_rms: bool,
    weight_offset: float = 0.0,
) -> list[Launch]:
    """`layer_norm_forward_plan.plan_forward` where `out.y` is float8_e4m3fn and `out.scale` takes rows' scales."""
    if x.ndim == 3:
        raise UnsupportedShapeError("a float8 y needs rows one constant stride apart, and parameters [cols]")
    rows, cols = x.shape
    config = choose_held(cols) or _choose_swept(cols, x.element_size())
    group = 16 // x.element_size()
    strides = row_strides(cols, x, residual)
    # Not more elements than one 16-byte load of x: for wider stores of y the compiler would widen a thread's share.
    vec = min(vector_units(cols, *strides), group)
    tensors = (x, residual, weight, bias, out.y, out.residual_out, out.mean, out.rstd, out.scale)
    sizes = (cols // vec, *(stride // vec for stride in strides), eps, *dropout_arguments(epilogue))
    options = {
        "BLOCK_N": config.block_n,
        "IS_RMS": is_rms,
        "num_warps": config.num_warps,
        **shared_options(vec, weight_offset, epilogue),
    }
    multiprocessors = multiprocessor_count(x.device)
    match config:
        case HeldRows():
            options |= {
                "ROWS": config.rows,
                "CHUNKS": config.chunks,
                "EVEN": cols == config.chunks * config.block_n,
            }
            options["PREFETCH"] = config.rows == 1 and can_prefetch(vec, x, residual)
            programs = cdiv(rows, config.rows)
            arguments = (*tensors, HELD_AHEAD_PER_SM * multiprocessors, rows, *sizes)
            return [Launch(layer_norm_quantise_held_kernel, (programs,), arguments, options)]
        case ForwardSweep():
            options |= {"EVEN": cols % config.block_n == 0, "GROUP": group}
            options["PREFETCH"] = can_prefetch(vec, x, residual)
            arguments = (*tensors, config.ahead_per_sm * multiprocessors, *sizes)
            return [Launch(layer_norm_quantise_sweep_kernel, (rows,), arguments, options)]


def _choose_swept(cols: int, itemsize: int) -> ForwardSweep:
    return next(sweep for limit, sweep in _SWEPT[itemsize] if cols <= limit)
