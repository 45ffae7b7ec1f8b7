"""Launches that fold partial sums to the gradients of GroupNorm's parameters."""

from torch import Tensor

from fusednorm.device import INTERPRETED
from fusednorm.integers import cdiv, next_power_of_2
from fusednorm.launch.launch import Launch, dependent
from fusednorm.ops.group_norm.backward_call import BackwardCall
from fusednorm.ops.group_norm.backward_reduce import (
    group_norm_fold_rows_kernel,
    group_norm_fold_samples_kernel,
    group_norm_fold_sums_kernel,
)
from fusednorm.ops.group_norm.forward_call import pair

SUMS_ELEMENTS, SUMS_COLUMNS = 4096, 64
"""Elements of a tile of the kernel that folds one group's two sums, and columns, at most."""

FOLD_ROWS, FOLD_COLUMNS, FOLD_NUM_WARPS = 512, 8, 8
"""Tile and warps of the kernel that folds dweight and dbias: one step for most, and many programs."""

FOLD_TWICE_ABOVE, FOLD_RUNS = 2048, 64
"""Partial rows above which dweight and dbias are folded in two steps, the first into FOLD_RUNS rows."""


def fold_groups(
    call: BackwardCall, parts: tuple[Tensor, Tensor], sum_g: Tensor, sum_g_xhat: Tensor, splits: int
) -> Launch:
    """The two sums of each group, [N, groups], from both of channels, [N, splits, C]."""
    sample = call.sample
    block_columns = min(SUMS_COLUMNS, next_power_of_2(sample.channels))
    block_splits = min(SUMS_ELEMENTS // block_columns, next_power_of_2(splits))
    arguments = (
        *parts, call.weight, call.scale, sum_g, sum_g_xhat, sample.groups, sample.channels, splits,
        call.scale_stride,
    )  # fmt: skip
    options = {
        "BLOCK_SPLITS": block_splits,
        "BLOCK_COLUMNS": block_columns,
        "FAST": not INTERPRETED,
        "num_warps": max(4, min(8, block_splits * block_columns // 256)),
        **dependent(call.early),
    }
    return Launch(group_norm_fold_sums_kernel, (sum_g.numel(),), arguments, options)


def fold_parameters(
    call: BackwardCall, parts: tuple[Tensor | None, Tensor | None], splits: int, *, beside: bool = False
) -> list[Launch]:
    """Gradients of parameters from partial sums [N, splits, C]; none for none.

    dbias and dweight in two steps where there are many samples, or where scale or shift want a sum for each sample.

    Args:
        beside: whether the kernel before lets the next one start when the partial sums are there.
    """
    dz, dz_xhat = parts
    out, c = call.out, call.sample.c
    if dz is None or all(t is None for t in (out.dbias, out.dweight, out.dscale, out.dshift)):
        return []
    tile = {"ROWS": FOLD_ROWS, "COLUMNS": FOLD_COLUMNS, "num_warps": FOLD_NUM_WARPS}
    options = {**tile, "FAST": not INTERPRETED, **dependent(call.early)}
    blocks = cdiv(c, FOLD_COLUMNS)
    rows = call.n * splits
    launches: list[Launch] = []
    affine = out.dbias is not None or out.dweight is not None
    if call.scale is not None or call.shift is not None:
        sums = pair(call.x, call.n, c) if affine else (None, None)
        of_samples = (
            dz, dz_xhat, call.weight, call.bias, call.scale, out.dscale, out.dshift, *sums, splits, c,
            call.scale_stride,
        )  # fmt: skip
        launches.append(
            Launch(group_norm_fold_samples_kernel, (blocks, call.n), of_samples, options | {"BESIDE": beside})
        )
        (dz, dz_xhat), rows = sums, call.n
    if not affine:
        return launches
    if rows > FOLD_TWICE_ABOVE:
        runs = FOLD_RUNS
        fewer = pair(call.x, runs, c)
        of_runs = (dz, dz_xhat, *fewer, rows, c, cdiv(rows, runs))
        launches.append(
            Launch(
                group_norm_fold_rows_kernel, (blocks, runs), of_runs, options | {"BESIDE": beside and not launches}
            )
        )
        (dz, dz_xhat), rows = fewer, runs
    of_all = (dz, dz_xhat, out.dbias, out.dweight, rows, c, rows)
    last = options | {"BESIDE": beside and not launches}
    return [*launches, Launch(group_norm_fold_rows_kernel, (blocks, 1), of_all, last)]
