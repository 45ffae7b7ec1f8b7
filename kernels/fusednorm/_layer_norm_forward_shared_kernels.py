"""Forward kernel of LayerNorm and RMSNorm for rows that several programs share."""

import triton
import triton.language as tl

from fusednorm._exchange import collect, first_tag, leave, post, slots
from fusednorm._prefetch import prefetch
from fusednorm._row_pieces import first_value, load_piece, merge, merge_even, piece_moments, total_moments, write_piece


@triton.jit(
    do_not_specialize=[
        "rows", "members", "slab_units", "col_units", "x_row_units", "residual_row_units", "seed", "dropout_threshold"
    ]
)  # fmt: skip
def layer_norm_forward_shared_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    residual_out_ptr,
    mean_ptr,
    rstd_ptr,
    mailbox_ptr,
    rows: tl.int64,
    members,
    slab_units,
    col_units,
    x_row_units: tl.int64,
    residual_row_units: tl.int64,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    EVEN: tl.constexpr,
    WHOLE: tl.constexpr,
    EQUAL_SLABS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPTH: tl.constexpr,
    LAG: tl.constexpr,
    AHEAD: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    IS_RMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """A row belongs to `members` programs, a slab of columns each; every slab is read twice.

    First for its moments, which are posted; LAG rows later, by when the other members' moments have come, out of
    L1 or L2 for y.  A slab is read in pieces of CHUNKS * BLOCK_N columns; where it is one piece (WHOLE), its
    parameters stay in registers, and the next row is under way while the last is written.  Programs are
    persistent; the launch must be cooperative.
    """
    cols = col_units * VEC
    slab = slab_units * VEC
    piece: tl.constexpr = CHUNKS * BLOCK_N
    group = tl.program_id(0) // members
    groups = tl.num_programs(0) // members
    member = tl.program_id(0) % members
    first_col = member * slab
    slab_cols = tl.minimum(cols - first_col, slab)
    pieces = tl.cdiv(slab_cols, piece)
    start = first_tag(mailbox_ptr)
    last_tag = start + tl.cdiv(rows, groups).to(tl.uint32) - 1
    turns = tl.cdiv(rows - group, groups)
    other = tl.arange(0, SLOTS)
    present = other < members
    count_of_other = tl.minimum(tl.maximum(cols - other * slab, 0), slab).to(tl.float32)
    x_row_size = x_row_units * VEC
    residual_row_size = residual_row_units * VEC
    if weight_ptr is not None:
        weight_ptr += first_col
    if bias_ptr is not None:
        bias_ptr += first_col
    if WHOLE:
        weights = load_piece(weight_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "")
        biases = load_piece(bias_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "")

    for turn in range(0, turns + LAG):
        # The row whose moments are taken; after the last turn, the last row again, for nothing.
        row = group + tl.minimum(turn, turns - 1) * groups
        x_slab_ptr = x_ptr + row * x_row_size + first_col
        residual_slab_ptr = residual_ptr
        if residual_ptr is not None:
            residual_slab_ptr = residual_ptr + row * residual_row_size + first_col
        pivot = first_value(x_ptr, residual_ptr, row, x_row_size, residual_row_size, IS_RMS)
        if WHOLE:
            chunks = load_piece(x_slab_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_last")
            residuals = load_piece(residual_slab_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_last")
        if WHOLE and AHEAD > 0 and turn + AHEAD < turns:
            prefetch(x_slab_ptr + AHEAD * groups * x_row_size, slab_cols)

        if turn >= LAG:
            late_row = group + (turn - LAG) * groups
            late_x_ptr = x_ptr + late_row * x_row_size + first_col
            late_residual_ptr = residual_ptr
            if residual_ptr is not None:
                late_residual_ptr = residual_ptr + late_row * residual_row_size + first_col
            y_at = late_row * cols.to(tl.int64) + first_col
            late_pivot = first_value(x_ptr, residual_ptr, late_row, x_row_size, residual_row_size, IS_RMS)
            if WHOLE and y_ptr is not None:
                late = load_piece(late_x_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_first")
                late_residuals = load_piece(
                    late_residual_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_first"
                )
            tag = start + (turn - LAG).to(tl.uint32)
            first_slot = slots(mailbox_ptr, group, tag, members, DEPTH)
            means, squares = collect(first_slot + tl.where(present, other, 0) * 2, tag)
            squares = tl.where(present, squares, 0.0)
            if IS_RMS:
                main = 0.0
                rest = 0.0
                square = tl.sum(squares)
            else:
                means = tl.where(present, means, 0.0)
                if EQUAL_SLABS:
                    _, mean, square = tl.reduce((count_of_other, means, squares), 0, merge_even)
                else:
                    _, mean, square = tl.reduce((count_of_other, means, squares), 0, merge)
                main = late_pivot + mean
                rest = (late_pivot - main) + mean
            rstd = 1.0 / tl.sqrt(square / cols.to(tl.float32) + eps)
            if member == 0:
                if mean_ptr is not None:
                    tl.store(mean_ptr + late_row, main)
                if rstd_ptr is not None:
                    tl.store(rstd_ptr + late_row, rstd)
            if y_ptr is not None:
                residual_out_slab_ptr = residual_out_ptr
                if residual_out_ptr is not None:
                    residual_out_slab_ptr = residual_out_ptr + y_at
                if WHOLE:
                    write_piece(
                        late, late_residuals, weights, biases, y_ptr + y_at, residual_out_slab_ptr,
                        slab_cols, late_row, first_col, main, rest, rstd, seed, dropout_threshold, dropout_scale,
                        EVEN, BLOCK_N, GROUP, WEIGHT_OFFSET, IS_RMS, ACTIVATION, DROPOUT, FAST,
                    )  # fmt: skip
                else:
                    for back in range(0, pieces):
                        at = (pieces - 1 - back) * piece
                        if AHEAD > 0 and back + 1 < pieces:
                            prefetch(late_x_ptr + at - piece, piece)
                        write_piece(
                            load_piece(
                                late_x_ptr + at, slab_cols - at, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_first"
                            ),
                            load_piece(
                                late_residual_ptr + at if late_residual_ptr is not None else None, slab_cols - at, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_first"
                            ),
                            load_piece(weight_ptr + at if weight_ptr is not None else None, slab_cols - at, EVEN, BLOCK_N, CHUNKS, GROUP, ""),
                            load_piece(bias_ptr + at if bias_ptr is not None else None, slab_cols - at, EVEN, BLOCK_N, CHUNKS, GROUP, ""),
                            y_ptr + y_at + at, residual_out_slab_ptr + at if residual_out_slab_ptr is not None else None,
                            slab_cols - at, late_row, first_col + at, main, rest, rstd,
                            seed, dropout_threshold, dropout_scale,
                            EVEN, BLOCK_N, GROUP, WEIGHT_OFFSET, IS_RMS, ACTIVATION, DROPOUT, FAST,
                        )  # fmt: skip

        if turn < turns:
            if not WHOLE:
                chunks = load_piece(x_slab_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_last")
                residuals = load_piece(residual_slab_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_last")
            count, mean, square = piece_moments(
                chunks, residuals, pivot, slab_cols, EVEN, BLOCK_N, GROUP, IS_RMS, FAST
            )
            if not WHOLE:
                for i in range(1, pieces):
                    at = i * piece
                    if AHEAD > 0 and i + 1 < pieces:
                        prefetch(x_slab_ptr + at + piece, tl.minimum(slab_cols - at - piece, piece))
                    more_count, more_mean, more_square = piece_moments(
                        load_piece(x_slab_ptr + at, slab_cols - at, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_last"),
                        load_piece(
                            residual_slab_ptr + at if residual_slab_ptr is not None else None, slab_cols - at, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_last"
                        ),
                        pivot, slab_cols - at, EVEN, BLOCK_N, GROUP, IS_RMS, FAST,
                    )  # fmt: skip
                    count, mean, square = merge(count, mean, square, more_count, more_mean, more_square)
            slab_mean, slab_square = total_moments(count, mean, square, EVEN)
            tag = start + turn.to(tl.uint32)
            mine = slots(mailbox_ptr, group, tag, members, DEPTH) + member * 2
            post(mine, tag, slab_mean, slab_square)

    leave(mailbox_ptr, last_tag)
