"""Several consecutive LayerNorms on the CPU."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusednorm.cpu.batch_invariant.row_modulation import RowModulation
from fusednorm.cpu.batch_invariant.row_norms import RowResults
from fusednorm.cpu.chunks import split_rows
from fusednorm.cpu.supported_arguments import to_float32


def layer_norm_chain(
    x: Tensor,
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    *,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
    memory_like: Callable[[Tensor], Tensor] = torch.empty_like,
) -> Tensor:
    """Compute consecutive LayerNorms of x [rows, cols], as `fusednorm.reference.chain.layer_norm_chain` does.

    Args: memory_like: as of `layer_norm_forward`.
    """
    out = RowResults(x, None, RowModulation(x), out_dtype, stats=False, centred=True, memory_like=memory_like)
    for piece in split_rows(out.rows, out.cols):
        h = out.add_residual(piece)
        for weight, bias in zip(weights, biases, strict=True):
            h, _, _ = torch.native_layer_norm(h, h.shape[-1:], to_float32(weight), to_float32(bias), eps)
        out.write_chunk(piece, h, None, None)
        del h
    return out.get_result().y
