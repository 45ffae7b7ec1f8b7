"""Forward kernel of LayerNorm and RMSNorm for rows that several programs share."""

import triton
import triton.language as tl

from fusednorm._exchange import collect, first_tag, leave, post, slots
from fusednorm._layer_norm_forward_kernels import finish
from fusednorm._prefetch import prefetch
from fusednorm._row_moments import column_mask, offset_weight, widened


@triton.jit
def _merge_even(count_a, mean_a, square_a, count_b, mean_b, square_b):
    """Chan's merge of the moments of two sets of as many values."""
    delta = mean_b - mean_a
    return count_a + count_b, mean_a + delta * 0.5, square_a + square_b + delta * delta * (count_a * 0.5)


@triton.jit
def _merge(count_a, mean_a, square_a, count_b, mean_b, square_b):
    """Chan's merge of the moments of two sets of values, of which either may be empty."""
    count = count_a + count_b
    delta = mean_b - mean_a
    share = count_b / tl.maximum(count, 1.0)
    return count, mean_a + delta * share, square_a + square_b + delta * delta * (count_a * share)


@triton.jit
def _first_value(x_ptr, residual_ptr, row, x_row_size, residual_row_size, IS_RMS: tl.constexpr):
    """A value that all members know: means are told as distances from it, so that none of their digits is lost."""
    value = 0.0
    if not IS_RMS:
        value = tl.load(x_ptr + row * x_row_size).to(tl.float32)
        if residual_ptr is not None:
            value += tl.load(residual_ptr + row * residual_row_size).to(tl.float32)
    return value


@triton.jit
def _load_piece(
    ptr, piece_cols, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """CHUNKS chunks of BLOCK_N columns as they lie in memory, a tuple of [lanes, GROUP]; nothing where ptr is None.

    A lane is the GROUP columns of each chunk that one thread loads at once.
    """
    col = tl.arange(0, BLOCK_N // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    chunks = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = column_mask(col + i * BLOCK_N, piece_cols, EVEN)
            chunks = chunks + (tl.load(ptr + i * BLOCK_N + col, mask=mask, other=0.0, eviction_policy=EVICT),)
    return chunks


@triton.jit
def _chunk(chunks, residuals, i: tl.constexpr, FAST: tl.constexpr):
    """Chunk i of h in float32."""
    h = widened(chunks[i], FAST)
    if len(residuals) > 0:
        h += widened(residuals[i], FAST)
    return h


@triton.jit
def _piece_moments(
    chunks, residuals, pivot, piece_cols,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, IS_RMS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Count, mean and sum of squares of each lane of a piece, [lanes, 1]; the mean is told from `pivot` on.

    For RMSNorm the squares are about 0.
    """
    lanes: tl.constexpr = BLOCK_N // GROUP
    col = tl.arange(0, lanes)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    count = tl.zeros((lanes, 1), tl.float32)
    mean = tl.zeros((lanes, 1), tl.float32)
    square = tl.zeros((lanes, 1), tl.float32)
    if EVEN:
        count += len(chunks) * GROUP
    else:
        for i in tl.static_range(len(chunks)):
            count += tl.sum((col + i * BLOCK_N < piece_cols).to(tl.float32), 1, keep_dims=True)
    if not IS_RMS:
        for i in tl.static_range(len(chunks)):
            d = _chunk(chunks, residuals, i, FAST) - pivot
            if not EVEN:
                d = tl.where(col + i * BLOCK_N < piece_cols, d, 0.0)
            mean += tl.sum(d, 1, keep_dims=True)
        if EVEN:
            mean = mean * (1.0 / (len(chunks) * GROUP))
        else:
            mean = mean / tl.maximum(count, 1.0)
    for i in tl.static_range(len(chunks)):
        d = _chunk(chunks, residuals, i, FAST)
        if not IS_RMS:
            d = (d - pivot) - mean
            if not EVEN:
                d = tl.where(col + i * BLOCK_N < piece_cols, d, 0.0)
        square += tl.sum(d * d, 1, keep_dims=True)
    return count, mean, square


@triton.jit
def _write_piece(
    chunks, residuals, weights, biases, y_ptr, residual_out_ptr, piece_cols, row, first_col, main, rest, rstd,
    seed, dropout_threshold, dropout_scale,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, IS_RMS: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """y, and h, of a piece that starts at column `first_col`; the pointers are to its place."""
    col = tl.arange(0, BLOCK_N // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for i in tl.static_range(len(chunks)):
        at = col + i * BLOCK_N
        mask = column_mask(at, piece_cols, EVEN)
        h = _chunk(chunks, residuals, i, FAST)
        if residual_out_ptr is not None:
            tl.store(residual_out_ptr + at, h.to(residual_out_ptr.dtype.element_ty), mask=mask)
        if IS_RMS:
            y = h * rstd
        elif chunks[i].dtype == tl.float32 or len(residuals) > 0:
            y = (h - main) * rstd - rest * rstd
        else:
            # One instruction; what it loses is below a 16-bit input's own rounding.
            y = h * rstd - (main * rstd + rest * rstd)
        if len(weights) > 0:
            y = y * offset_weight(widened(weights[i], FAST), WEIGHT_OFFSET)
        if len(biases) > 0:
            y = y + widened(biases[i], FAST)
        if ACTIVATION != "none" or DROPOUT:
            y = tl.reshape(y, (1, BLOCK_N))
            y = finish(
                y,
                row,
                first_col + i * BLOCK_N,
                seed,
                dropout_threshold,
                dropout_scale,
                ACTIVATION,
                DROPOUT,
                FAST,
            )
            y = tl.reshape(y, (BLOCK_N // GROUP, GROUP))
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


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
    EQUAL: tl.constexpr,
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
        weights = _load_piece(weight_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "")
        biases = _load_piece(bias_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "")

    for turn in range(0, turns + LAG):
        # The row whose moments are taken; after the last turn, the last row again, for nothing.
        row = group + tl.minimum(turn, turns - 1) * groups
        x_slab_ptr = x_ptr + row * x_row_size + first_col
        residual_slab_ptr = residual_ptr
        if residual_ptr is not None:
            residual_slab_ptr = residual_ptr + row * residual_row_size + first_col
        pivot = _first_value(x_ptr, residual_ptr, row, x_row_size, residual_row_size, IS_RMS)
        if WHOLE:
            chunks = _load_piece(x_slab_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_last")
            residuals = _load_piece(residual_slab_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_last")
        if AHEAD > 0 and turn + AHEAD < turns:
            prefetch(x_slab_ptr + AHEAD * groups * x_row_size, slab_cols)

        if turn >= LAG:
            late_row = group + (turn - LAG) * groups
            late_x_ptr = x_ptr + late_row * x_row_size + first_col
            late_residual_ptr = residual_ptr
            if residual_ptr is not None:
                late_residual_ptr = residual_ptr + late_row * residual_row_size + first_col
            y_at = late_row * cols.to(tl.int64) + first_col
            late_pivot = _first_value(x_ptr, residual_ptr, late_row, x_row_size, residual_row_size, IS_RMS)
            if WHOLE and y_ptr is not None:
                late = _load_piece(late_x_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_first")
                late_residuals = _load_piece(
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
                if EQUAL:
                    _, mean, square = tl.reduce((count_of_other, means, squares), 0, _merge_even)
                else:
                    _, mean, square = tl.reduce((count_of_other, means, squares), 0, _merge)
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
                    _write_piece(
                        late, late_residuals, weights, biases, y_ptr + y_at, residual_out_slab_ptr,
                        slab_cols, late_row, first_col, main, rest, rstd, seed, dropout_threshold, dropout_scale,
                        EVEN, BLOCK_N, GROUP, WEIGHT_OFFSET, IS_RMS, ACTIVATION, DROPOUT, FAST,
                    )  # fmt: skip
                else:
                    for back in range(0, pieces):
                        at = (pieces - 1 - back) * piece
                        _write_piece(
                            _load_piece(
                                late_x_ptr + at, slab_cols - at, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_first"
                            ),
                            _load_piece(
                                late_residual_ptr + at if late_residual_ptr is not None else None, slab_cols - at, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_first"
                            ),
                            _load_piece(weight_ptr + at if weight_ptr is not None else None, slab_cols - at, EVEN, BLOCK_N, CHUNKS, GROUP, ""),
                            _load_piece(bias_ptr + at if bias_ptr is not None else None, slab_cols - at, EVEN, BLOCK_N, CHUNKS, GROUP, ""),
                            y_ptr + y_at + at, residual_out_slab_ptr + at if residual_out_slab_ptr is not None else None,
                            slab_cols - at, late_row, first_col + at, main, rest, rstd,
                            seed, dropout_threshold, dropout_scale,
                            EVEN, BLOCK_N, GROUP, WEIGHT_OFFSET, IS_RMS, ACTIVATION, DROPOUT, FAST,
                        )  # fmt: skip

        if turn < turns:
            if not WHOLE:
                chunks = _load_piece(x_slab_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_last")
                residuals = _load_piece(residual_slab_ptr, slab_cols, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_last")
            count, mean, square = _piece_moments(
                chunks, residuals, pivot, slab_cols, EVEN, BLOCK_N, GROUP, IS_RMS, FAST
            )
            if not WHOLE:
                for i in range(1, pieces):
                    at = i * piece
                    more_count, more_mean, more_square = _piece_moments(
                        _load_piece(x_slab_ptr + at, slab_cols - at, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_last"),
                        _load_piece(
                            residual_slab_ptr + at if residual_slab_ptr is not None else None, slab_cols - at, EVEN, BLOCK_N, CHUNKS, GROUP, "evict_last"
                        ),
                        pivot, slab_cols - at, EVEN, BLOCK_N, GROUP, IS_RMS, FAST,
                    )  # fmt: skip
                    count, mean, square = _merge(count, mean, square, more_count, more_mean, more_square)
            if EVEN:
                _, mean, square = tl.reduce((count, mean, square), 0, _merge_even, keep_dims=True)
            else:
                _, mean, square = tl.reduce((count, mean, square), 0, _merge, keep_dims=True)
            tag = start + turn.to(tl.uint32)
            mine = slots(mailbox_ptr, group, tag, members, DEPTH) + member * 2
            post(mine, tag, tl.sum(mean), tl.sum(square))

    leave(mailbox_ptr, last_tag)
