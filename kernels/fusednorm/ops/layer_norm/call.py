"""What the plans of LayerNorm and RMSNorm share: strides, programs, and options of a launch."""

import sys

from torch import Tensor

from fusednorm.checks import Epilogue
from fusednorm.device import INTERPRETED, multiprocessor_count
from fusednorm.errors import UnsupportedShapeError
from fusednorm.integers import cdiv
from fusednorm.ops.layer_norm import configs

MAX_HEADS = 65535
"""They are a launch's second axis."""


def row_strides(cols: int, *tensors: Tensor | None) -> tuple[int, ...]:
    """Elements from row to row, or token to token; cols where it does not matter: it costs no vector width."""
    return tuple(cols if tensor is None or tensor.shape[0] == 1 else tensor.stride(0) for tensor in tensors)


def layout(
    config: configs.Forward | configs.Backward, cols: int, own_parameters: bool, *tensors: Tensor | None
) -> tuple[str, tuple[int, ...]]:
    """HEADS of `jit.heads` for [rows, cols] or [tokens, heads, cols] tensors, and the stride of each for it.

    Raises:
        UnsupportedShapeError: rows too long, too many heads, or heads that lie in no way that kernels walk.
    """
    if all(tensor is None or tensor.ndim == 2 for tensor in tensors):
        return "none", row_strides(cols, *tensors)
    present = [tensor for tensor in tensors if tensor is not None]
    tokens, heads, _ = present[0].shape
    match config:
        case configs.ForwardTile() | configs.ForwardRow() | configs.ForwardSweep() | configs.BackwardTile():
            pass
        case _:
            raise UnsupportedShapeError(
                f"rows of {cols} columns are too long for two strides, and for heads with parameters of their own"
            )
    if heads > MAX_HEADS:
        raise UnsupportedShapeError(f"there must be at most {MAX_HEADS} heads, got {heads}")
    if heads == 1 or all(tensor.stride(1) == cols for tensor in present):
        return "own" if own_parameters else "shared", row_strides(cols, *tensors)
    if own_parameters and (tokens == 1 or all(tensor.stride(0) == heads * tensor.stride(1) for tensor in present)):
        return "own_uniform", tuple(cols if tensor is None else tensor.stride(1) for tensor in tensors)
    raise UnsupportedShapeError(
        f"the heads of every token must lie {cols} elements apart, or all rows one constant stride apart, "
        f"got strides {', '.join(str(list(tensor.stride())) for tensor in present)}"
    )


def grid(programs: int, x: Tensor) -> tuple[int, ...]:
    return (programs,) if x.ndim == 2 else (programs, x.shape[1])


def tile_programs(x: Tensor, config: configs.ForwardTile | configs.BackwardTile) -> int:
    """Programs of a tile kernel over x, for each head."""
    tiles: int = cdiv(x.shape[0], config.rows)
    return max(1, min(tiles, most_programs(x, config)))


def most_programs(x: Tensor, config: configs.ForwardTile | configs.BackwardTile) -> int:
    """Programs of a tile kernel for each head of x, however many rows there are."""
    if not config.programs_per_sm:
        return sys.maxsize
    resident = multiprocessor_count(x.device) * config.programs_per_sm
    return resident if x.ndim == 2 else resident // x.shape[1]


def shared_options(vec: int, weight_offset: float, epilogue: Epilogue) -> dict[str, object]:
    """Constexprs of every kernel with an epilogue whose sizes come in units of `vec` elements."""
    return {
        "VEC": vec,
        "WEIGHT_OFFSET": float(weight_offset),
        "ACTIVATION": epilogue.activation,
        "DROPOUT": epilogue.dropout > 0.0,
        "FAST": not INTERPRETED,
    }
