"""Backward kernels of GroupNorm where each group is contiguous.

With z = x_hat * weight + bias, dz = dy * act'(z) (dropout's factor included) and g = weight * dz, over a
group of M values: dx = rstd * (g - (sum(g) + x_hat * sum(g * x_hat)) / M).  Both sums come from the sums of
dz and of dz * x_hat over each channel, which are what dweight and dbias need too; x_hat is centred, so
neither cancels.

A channel is cut into `splits` runs of `run_units` vectors (the last may be shorter).  A tile [RUNS, UNITS,
VEC] holds as many runs side by side, each with one weight and one bias; with UNITS = 32 a run stays in one
warp and its sum crosses none.  Sums over runs lie as [N, splits, C].

The file is long by its argument lists, a line each.
"""

import triton
import triton.language as tl

from fusednorm._group_norm_tiles import load_bias, load_masked, load_sum, load_weight, output_gradient
from fusednorm._reductions import sum_pair


@triton.jit
def _over_runs(value):
    """[RUNS] as [RUNS, 1, 1].  Loads of a value a run are 1-d: in a tile's layout they repeat."""
    return value[:, None, None]


@triton.jit
def _run_sums(
    dy_ptr,
    x_ptr,
    residual_ptr,
    offset,
    length,
    sample_start,
    run_units,
    mean,
    rstd,
    weight,
    bias,
    sample,
    seed,
    dropout_threshold,
    dropout_scale,
    VEC: tl.constexpr,
    RUNS: tl.constexpr,
    UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sums of dz and of dz * x_hat over each of RUNS runs, [RUNS].

    `offset` is where each run starts and `sample_start` where its sample does, in vectors of the whole
    tensor.  What is of one run is [RUNS]; what may be of the group is a scalar or [RUNS, 1, 1].
    """
    offset = _over_runs(offset)
    length = _over_runs(length)
    weight = _over_runs(weight)
    bias = _over_runs(bias)
    unit = tl.arange(0, UNITS)[None, :, None]
    inner = tl.arange(0, VEC)[None, None, :]
    sum_dz = tl.zeros((RUNS, UNITS, 1), tl.float32)
    sum_dz_xhat = tl.zeros((RUNS, UNITS, 1), tl.float32)
    for first in range(0, run_units, UNITS):
        mask = first + unit < length
        at = (offset + first + unit) * VEC + inner
        dy = load_masked(dy_ptr, at, mask, "evict_last")
        h = load_sum(x_ptr, residual_ptr, at, mask, "evict_last")
        # Masked elements count as x_hat = 0: -mean * rstd may overflow, and 0 * inf would spoil the sum.
        xhat = tl.where(mask, (h - mean) * rstd, 0.0)
        dz = output_gradient(
            dy, xhat, weight, bias, sample, at - sample_start * VEC, seed, dropout_threshold, dropout_scale,
            ACTIVATION, DROPOUT, FAST,
        )  # fmt: skip
        sum_dz += tl.sum(dz, 2, keep_dims=True)
        sum_dz_xhat += tl.sum(dz * xhat, 2, keep_dims=True)
    total_dz, total_dz_xhat = sum_pair(sum_dz, sum_dz_xhat, 1, FAST)
    return tl.reshape(total_dz, (RUNS,)), tl.reshape(total_dz_xhat, (RUNS,))


@triton.jit
def _run_input_gradient(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    dx_ptr,
    offset,
    length,
    sample_start,
    run_units,
    mean,
    rstd,
    weight,
    bias,
    mean_g,
    mean_g_xhat,
    sample,
    seed,
    dropout_threshold,
    dropout_scale,
    VEC: tl.constexpr,
    UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Write dx of runs; `mean_g` and `mean_g_xhat` are the group's sums over its number of values."""
    offset = _over_runs(offset)
    length = _over_runs(length)
    weight = _over_runs(weight)
    bias = _over_runs(bias)
    unit = tl.arange(0, UNITS)[None, :, None]
    inner = tl.arange(0, VEC)[None, None, :]
    scale = rstd * weight
    steps = tl.cdiv(run_units, UNITS)
    for step in range(0, steps):
        first = (steps - 1 - step) * UNITS
        mask = first + unit < length
        at = (offset + first + unit) * VEC + inner
        dy = load_masked(dy_ptr, at, mask, "evict_first")
        xhat = (load_sum(x_ptr, residual_ptr, at, mask, "evict_first") - mean) * rstd
        dz = output_gradient(
            dy, xhat, weight, bias, sample, at - sample_start * VEC, seed, dropout_threshold, dropout_scale,
            ACTIVATION, DROPOUT, FAST,
        )  # fmt: skip
        dx = scale * dz - rstd * (mean_g + xhat * mean_g_xhat)
        if dresidual_out_ptr is not None:
            dx += load_masked(dresidual_out_ptr, at, mask, "evict_first")
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["rows", "channel_units", "groups", "channels"])
def group_norm_nchw_backward_tile_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dz_part_ptr,
    dz_xhat_part_ptr,
    rows: tl.int64,
    channel_units: tl.int32,
    groups: tl.int32,
    channels: tl.int32,
    eps: tl.float32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """ROWS whole groups a program, [ROWS, CHANNELS, POSITIONS] in registers: dy and x are read once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    channel = tl.arange(0, CHANNELS)[None, :, None]
    position = tl.arange(0, POSITIONS)[None, None, :]
    row_mask = row < rows
    channel_mask = row_mask & (channel < channels)
    mask = channel_mask & (position < channel_units * VEC)
    at = (row * channels + channel) * (channel_units.to(tl.int64) * VEC) + position
    length = (channels * channel_units).to(tl.float32) * VEC
    sample = row // groups
    group = (row - sample * groups).to(tl.int32)
    parameter = group * channels + channel

    dy = load_masked(dy_ptr, at, mask, "evict_first")
    h = load_sum(x_ptr, residual_ptr, at, mask, "evict_first")
    if mean_ptr is None:
        pivot = tl.sum(tl.sum(h, 2, keep_dims=True), 1, keep_dims=True) / length
        d = tl.where(mask, h - pivot, 0.0)
        shift, square = sum_pair(tl.sum(d, 2, keep_dims=True), tl.sum(d * d, 2, keep_dims=True), 1, FAST)
        shift /= length
        variance = square / length - shift * shift
        mean = pivot + shift
        rstd = 1.0 / tl.sqrt(tl.where(variance < 0.0, 0.0, variance) + eps)
    else:
        mean = tl.load(mean_ptr + row, mask=row_mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0)

    weight = load_weight(weight_ptr, parameter, channel_mask)
    bias = load_bias(bias_ptr, parameter, channel_mask)
    xhat = tl.where(mask, (h - mean) * rstd, 0.0)
    sample_start = sample * groups * channels * (channel_units.to(tl.int64) * VEC)
    dz = output_gradient(
        dy, xhat, weight, bias, sample, at - sample_start, seed, dropout_threshold, dropout_scale,
        ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip
    sum_dz, sum_dz_xhat = sum_pair(dz, dz * xhat, 2, FAST)
    if dz_part_ptr is not None:
        slot = row * channels + channel
        tl.store(dz_part_ptr + slot, sum_dz, mask=channel_mask)
        tl.store(dz_xhat_part_ptr + slot, sum_dz_xhat, mask=channel_mask)
    sum_g, sum_g_xhat = sum_pair(sum_dz * weight, sum_dz_xhat * weight, 1, FAST)
    dx = rstd * (dz * weight - (sum_g + xhat * sum_g_xhat) / length)
    if dresidual_out_ptr is not None:
        dx += load_masked(dresidual_out_ptr, at, mask, "evict_first")
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _runs_of_tensor(first, runs, channel_units, groups, channels, splits, run_units, RUNS: tl.constexpr):
    """Where RUNS runs of the tensor lie: mask, sample, row of statistics, channel, slot, start, length."""
    run = first + tl.arange(0, RUNS)
    mask = run < runs
    line = run // splits
    split = run - line * splits
    c = groups.to(tl.int64) * channels
    sample = line // c
    channel = line - sample * c
    start = split * run_units
    units = tl.where(mask, tl.minimum(run_units, channel_units - start), 0)
    slot = (sample * splits + split) * c + channel
    return mask, sample, line // channels, channel, slot, line * channel_units + start, units


@triton.jit(do_not_specialize=["runs", "channel_units", "groups", "channels", "splits", "run_units"])
def group_norm_nchw_backward_sums_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    dz_part_ptr,
    dz_xhat_part_ptr,
    runs: tl.int64,
    channel_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    splits: tl.int32,
    run_units: tl.int32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    RUNS: tl.constexpr,
    UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sums of dz and dz * x_hat over RUNS runs a program, of any channels and samples."""
    mask, sample, row, channel, slot, offset, units = _runs_of_tensor(
        tl.program_id(0).to(tl.int64) * RUNS, runs, channel_units, groups, channels, splits, run_units, RUNS
    )
    sum_dz, sum_dz_xhat = _run_sums(
        dy_ptr, x_ptr, residual_ptr,
        offset, units, _over_runs(sample * groups * channels * channel_units), run_units,
        _over_runs(tl.load(mean_ptr + row, mask=mask, other=0.0)),
        _over_runs(tl.load(rstd_ptr + row, mask=mask, other=0.0)),
        load_weight(weight_ptr, channel, mask), load_bias(bias_ptr, channel, mask),
        _over_runs(sample), seed, dropout_threshold, dropout_scale,
        VEC, RUNS, UNITS, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip
    tl.store(dz_part_ptr + slot, sum_dz, mask=mask)
    tl.store(dz_xhat_part_ptr + slot, sum_dz_xhat, mask=mask)


@triton.jit(do_not_specialize=["runs", "channel_units", "groups", "channels", "splits", "run_units"])
def group_norm_nchw_backward_apply_kernel(
    dy_ptr,
    x_ptr,
    residual_ptr,
    dresidual_out_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    sum_g_ptr,
    sum_g_xhat_ptr,
    dx_ptr,
    runs: tl.int64,
    channel_units: tl.int64,
    groups: tl.int32,
    channels: tl.int32,
    splits: tl.int32,
    run_units: tl.int32,
    seed: tl.int64,
    dropout_threshold: tl.int64,
    dropout_scale: tl.float32,
    VEC: tl.constexpr,
    RUNS: tl.constexpr,
    UNITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FAST: tl.constexpr,
):
    """dx of RUNS runs a program; programs walk the tensor backwards."""
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    mask, sample, row, channel, _, offset, units = _runs_of_tensor(
        program * RUNS, runs, channel_units, groups, channels, splits, run_units, RUNS
    )
    length = (channels * channel_units).to(tl.float32) * VEC
    _run_input_gradient(
        dy_ptr, x_ptr, residual_ptr, dresidual_out_ptr, dx_ptr,
        offset, units, _over_runs(sample * groups * channels * channel_units), run_units,
        _over_runs(tl.load(mean_ptr + row, mask=mask, other=0.0)),
        _over_runs(tl.load(rstd_ptr + row, mask=mask, other=0.0)),
        load_weight(weight_ptr, channel, mask), load_bias(bias_ptr, channel, mask),
        _over_runs(tl.load(sum_g_ptr + row, mask=mask, other=0.0) / length),
        _over_runs(tl.load(sum_g_xhat_ptr + row, mask=mask, other=0.0) / length),
        _over_runs(sample), seed, dropout_threshold, dropout_scale, VEC, UNITS, ACTIVATION, DROPOUT, FAST,
    )  # fmt: skip
