"""Forward kernel of LayerNorm and RMSNorm for rows that one program holds as they lie in memory."""

import triton
import triton.language as tl

from fusednorm._prefetch import FEW_PROGRAMS, prefetch_parameters, prefetch_row_ahead
from fusednorm._row_heads import parameter_start, programs_of_head, row_of_token, row_start
from fusednorm._row_pieces import chunk_of, load_piece, piece_moments, total_moments, write_chunk, write_piece


@triton.jit
def _normalise(
    chunks, residuals, weights, biases, weight_ptr, bias_ptr, own, y_ptr, residual_out_ptr, mean_ptr, rstd_ptr,
    x_ptr, residual_ptr, ahead, x_row_size, residual_row_size, row, cols, eps,
    seed, dropout_threshold, dropout_scale,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr, IS_RMS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Moments and y of a row that is loaded; EARLY with its parameters, as tuples like it.

    With AHEAD the row of the program `ahead` programs on is asked into L2 between the two.
    """
    count, mean, shift, square = piece_moments(chunks, residuals, cols, EVEN, BLOCK_N, GROUP, IS_RMS, FAST)
    mean, shift, square = total_moments(count, mean, shift, square, EVEN, FAST)
    rstd = 1.0 / tl.sqrt(square / cols.to(tl.float32) + eps)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean + shift)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)
    y_row = row * cols.to(tl.int64)
    if AHEAD:
        prefetch_row_ahead(x_ptr, residual_ptr, ahead, x_row_size, residual_row_size, cols)
    if EARLY:
        for i in tl.static_range(len(chunks)):
            write_chunk(
                chunk_of(chunks, residuals, i, FAST), weights[i : i + 1], biases[i : i + 1], i,
                y_ptr, residual_out_ptr, y_row, cols, row, 0,
                mean, shift, rstd, seed, dropout_threshold, dropout_scale,
                EVEN, BLOCK_N, GROUP, WEIGHT_OFFSET, IS_RMS, ACTIVATION, DROPOUT, FAST,
            )  # fmt: skip
    else:
        write_piece(
            chunks, residuals, weight_ptr, bias_ptr, own, y_ptr, residual_out_ptr, y_row, cols, row, 0,
            mean, shift, rstd, seed, dropout_threshold, dropout_scale,
            EVEN, BLOCK_N, GROUP, WEIGHT_OFFSET, IS_RMS, ACTIVATION, DROPOUT, FAST,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["ahead", "col_units", "x_row_units", "residual_row_units", "seed", "dropout_threshold"]
)
def layer_norm_forward_row_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    residual_out_ptr,
    mean_ptr,
    rstd_ptr,
    ahead,
    col_units,
    x_row_units: tl.int64,
    residual_row_units: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    PREFETCH: tl.constexpr,
    ALONE: tl.constexpr,
    EARLY: tl.constexpr,
    HEADS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    IS_RMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """One row a program, of CHUNKS chunks of BLOCK_N columns; read once, parameters after the reduction unless the
    programs are few and EARLY says that there are registers.

    The row of the program `ahead` programs on is asked into L2 meanwhile; 0 for none.  ALONE is for programs that
    have a multiprocessor each.
    """
    cols = col_units * VEC
    program, _, head, heads = programs_of_head(HEADS)
    token = program.to(tl.int64)
    row = row_of_token(token, head, heads, HEADS)
    x_row = row_start(token, row, head, x_row_units * VEC, cols, HEADS)
    residual_row = row_start(token, row, head, residual_row_units * VEC, cols, HEADS)
    own = parameter_start(head, cols, HEADS)

    chunks = load_piece(x_ptr, x_row, cols, EVEN, BLOCK_N, CHUNKS, GROUP, "")
    residuals = load_piece(residual_ptr, residual_row, cols, EVEN, BLOCK_N, CHUNKS, GROUP, "")
    x_row_size = x_row_units * VEC
    residual_row_size = residual_row_units * VEC
    few = tl.num_programs(0) <= FEW_PROGRAMS
    if EARLY and few:
        # Nothing else hides the latency of the parameters: with the row, into registers.
        weights = load_piece(weight_ptr, own, cols, EVEN, BLOCK_N, CHUNKS, GROUP, "")
        biases = load_piece(bias_ptr, own, cols, EVEN, BLOCK_N, CHUNKS, GROUP, "")
        _normalise(
            chunks, residuals, weights, biases, weight_ptr, bias_ptr, own,
            y_ptr, residual_out_ptr, mean_ptr, rstd_ptr,
            x_ptr, residual_ptr, ahead, x_row_size, residual_row_size, row, cols, eps,
            seed, dropout_threshold, dropout_scale,
            EVEN, BLOCK_N, GROUP, False, True, WEIGHT_OFFSET, IS_RMS, ACTIVATION, DROPOUT, FAST,
        )  # fmt: skip
    else:
        if PREFETCH:
            if few:
                prefetch_parameters(weight_ptr, bias_ptr, 0, cols)
            elif not ALONE:
                prefetch_row_ahead(x_ptr, residual_ptr, ahead, x_row_size, residual_row_size, cols)
        # A program that is alone asks later: before, it would come between its own row and the statistics, with no
        # other program to fill the gap.
        _normalise(
            chunks, residuals, (), (), weight_ptr, bias_ptr, own,
            y_ptr, residual_out_ptr, mean_ptr, rstd_ptr,
            x_ptr, residual_ptr, ahead, x_row_size, residual_row_size, row, cols, eps,
            seed, dropout_threshold, dropout_scale,
            EVEN, BLOCK_N, GROUP, PREFETCH and ALONE, False, WEIGHT_OFFSET, IS_RMS, ACTIVATION, DROPOUT, FAST,
        )  # fmt: skip
