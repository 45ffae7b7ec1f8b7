"""Launch configurations that may suit a row length; `benchmarks.tune.layer_norm` times them.

Limits on registers are estimates of the compiler's results; they exclude configurations that cannot be fast, not
all slow ones.
"""

from collections.abc import Iterator
from itertools import product

from fusednorm.ops.layer_norm.backward.cooperative import LayerNormBackwardCooperative
from fusednorm.ops.layer_norm.backward.split import LayerNormBackwardSplit
from fusednorm.ops.layer_norm.backward.tile import LayerNormBackwardTile
from fusednorm.ops.layer_norm.config_tables import BackwardConfig, ForwardConfig
from fusednorm.ops.layer_norm.forward.cooperative import LayerNormForwardCooperative
from fusednorm.ops.layer_norm.forward.resident import LayerNormForwardResident
from fusednorm.ops.layer_norm.forward.split import LayerNormForwardSplit
from fusednorm.ops.layer_norm.forward.sweep import LayerNormForwardSweep
from fusednorm.ops.layer_norm.forward.tile import LayerNormForwardTile

_TILE_REGISTERS = 82_000
"""Registers of a multiprocessor, a little more than exist: the estimate is too high for large tiles."""

_TILE_SHARED_BYTES = 220_000
_SHARED_ROWS = 8192
"""Rows up to this many columns are not shared by programs."""

_PARTED_ROWS = 1 << 18
"""Rows up to this many columns are not processed in parts."""

_MULTIPROCESSORS = 132
"""Number on an H200: programs that share a row must all be resident."""


def iterate_candidates(pass_: str, cols: int, itemsize: int) -> Iterator[ForwardConfig | BackwardConfig]:
    """Configurations for rows of `cols` elements of `itemsize` bytes, each once.

    Args:
        pass_: forward or backward.
    """
    if pass_ == "forward":
        yield from iterate_forward_tiles(cols, itemsize)
        yield from iterate_forward_sweeps(cols, itemsize)
        yield from iterate_forward_resident(cols, itemsize)
        if cols > _SHARED_ROWS:
            yield from iterate_forward_cooperative(cols, itemsize)
        if cols > _PARTED_ROWS:
            yield from iterate_forward_split()
    else:
        yield from iterate_backward_tiles(cols, itemsize)
        if cols > _SHARED_ROWS:
            for block in (1024, 2048):
                yield LayerNormBackwardSplit(
                    4096, 8, rows=1, block_n=block, num_warps=4, stages=4, programs_per_sm=2
                )
            yield from iterate_backward_cooperative(cols, itemsize)


def iterate_forward_tiles(cols: int, itemsize: int) -> Iterator[LayerNormForwardTile]:
    """One program per tile; short rows also with persistent programs and tiles in flight in shared memory."""
    if cols * itemsize > 64 << 10:
        return
    for chunks, block in _iterate_chunkings(cols):
        if block < 128 and block * 3 > cols and block < cols:
            continue
        for rows, warps, registers in _iterate_tilings(chunks * block, tensors=1):
            yield LayerNormForwardTile(rows, chunks, block, warps)
            tile_bytes = rows * chunks * block * itemsize
            for stages, per_sm in product((3, 4, 5), sorted({8 // warps, 12 // warps, 16 // warps})):
                fits = registers * per_sm <= _TILE_REGISTERS and tile_bytes * stages * per_sm <= _TILE_SHARED_BYTES
                if per_sm and fits and cols * itemsize <= 6144:
                    yield LayerNormForwardTile(rows, chunks, block, warps, stages, per_sm)


def iterate_backward_tiles(cols: int, itemsize: int) -> Iterator[LayerNormBackwardTile]:
    """Persistent programs with tiles in flight in shared memory; long rows also without weight in registers."""
    if cols * itemsize > 32 << 10:
        return
    whole = _round_up_to_power_of_2(cols)
    for chunks, block in {*_iterate_chunkings(cols), (1, whole)}:
        for rows, warps, registers in _iterate_tilings(chunks * block, tensors=2):
            tile_bytes = 2 * rows * chunks * block * itemsize
            for stages, per_sm in _iterate_stages(chunks * block, tile_bytes, registers):
                for ahead in sorted({0, 3, stages, 6}):
                    yield LayerNormBackwardTile(rows, block, warps, stages, per_sm, True, chunks, ahead)
                    if block >= 8192:
                        yield LayerNormBackwardTile(rows, block, warps, stages, per_sm, False, chunks, ahead)


def _iterate_chunkings(cols: int) -> Iterator[tuple[int, int]]:
    """(chunks, block) that hold a row: those with the least waste, and all that waste at most an eighth."""
    whole = _round_up_to_power_of_2(cols)
    found = [(-(-cols // block), block) for block in (whole >> shift for shift in range(5)) if block >= 16]
    least = min(chunks * block for chunks, block in found)
    for chunks, block in found:
        waste = chunks * block - cols
        if chunks <= 10 and (8 * waste <= chunks * block or chunks * block == least):
            yield chunks, block


def _iterate_tilings(slab: int, tensors: int) -> Iterator[tuple[int, int, int]]:
    """(rows, warps, registers) of tiles of that many tensors of rows padded to `slab` columns."""
    least_held = 8 if slab <= 256 else 16 // tensors
    for rows, warps in product((1, 2, 4, 8, 16, 32) if slab <= 192 else (1, 2, 4, 8), (1, 2, 4, 8, 16, 32)):
        held = rows * slab // (32 * warps)
        registers = tensors * 32 * warps * (2 * held + 32)
        if least_held <= held <= 64 // tensors and registers <= _TILE_REGISTERS:
            yield rows, warps, registers


def _iterate_stages(slab: int, tile_bytes: int, registers: int) -> Iterator[tuple[int, int]]:
    """(stages, programs_per_sm) that keep enough bytes of tiles in flight and fit shared memory and registers."""
    least_shared = 16_000 if slab <= 128 else 30_000
    for stages, per_sm in product((3, 4, 5), (1, 2, 3, 4, 6, 8, 12, 16)):
        shared = tile_bytes * (stages - 1) * per_sm
        if registers * per_sm <= _TILE_REGISTERS and least_shared <= shared <= _TILE_SHARED_BYTES:
            yield stages, per_sm


def iterate_forward_sweeps(cols: int, itemsize: int) -> Iterator[LayerNormForwardSweep]:
    """Two or more chunks per row, with 8 to 32 elements per thread; rows over 16 KB also with prefetch."""
    for block, warps in product((512, 1024, 2048, 4096, 8192, 16384), (2, 4, 8, 16, 32)):
        if 8 <= block // (32 * warps) <= 32 and 2 * block <= cols:
            for ahead_per_sm in (0, 1, 2, 3, 4) if cols * itemsize > 16384 else (0,):
                yield LayerNormForwardSweep(block, warps, ahead_per_sm)


def iterate_forward_resident(cols: int, itemsize: int) -> Iterator[LayerNormForwardResident]:
    """Chunks that a row fills except for the last; as many programs as the registers for a row's data allow.

    Rows of 4 KB and more also with prefetch.
    """
    for chunks, warps in product(range(1, 17), (1, 2, 4, 8, 16, 32)):
        if cols <= chunks * 256 * warps < cols + 256 * warps:
            for per_sm in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24):
                if 24 + 2 * chunks * itemsize <= 2048 / (warps * per_sm) <= 176:
                    for ahead_per_sm in (0, 1, 2) if cols * itemsize >= 4096 else (0,):
                        yield LayerNormForwardResident(chunks, warps, per_sm, ahead_per_sm)


def iterate_forward_cooperative(cols: int, itemsize: int) -> Iterator[LayerNormForwardCooperative]:
    """Slabs of 1 to 32 thousand columns, fewer than programs; as many programs as the registers for slabs allow."""
    for (chunks, warps, per_sm), lag, ahead in product(_iterate_ranges(itemsize), (1, 2, 3), (1, 2)):
        slab = chunks * 256 * warps
        if slab < cols <= slab * per_sm * _MULTIPROCESSORS:
            yield LayerNormForwardCooperative(chunks, warps, per_sm, lag, ahead)


def iterate_forward_split() -> Iterator[LayerNormForwardSplit]:
    """Pieces and slabs of 1 to 8 thousand columns."""
    tiles = tuple((chunks, warps) for chunks, warps in product((1, 2, 4), (4, 8)))
    for (chunks, warps), (slab_chunks, slab_warps), rows in product(tiles, tiles, (4, 16)):
        yield LayerNormForwardSplit(chunks, warps, slab_chunks, slab_warps, rows)


def _iterate_ranges(itemsize: int) -> Iterator[tuple[int, int, int]]:
    """(chunks, warps, programs_per_sm)."""
    for chunks, warps, resident_warps in product((1, 2, 4, 8), (4, 8, 16), (16, 20, 24, 28, 32)):
        if resident_warps % warps == 0 and 40 + 5 * chunks * itemsize <= 2048 // resident_warps:
            yield chunks, warps, resident_warps // warps


def iterate_backward_cooperative(cols: int, itemsize: int) -> Iterator[LayerNormBackwardCooperative]:
    """Slabs of 8 or 16 columns per thread, fewer than programs; as many programs as registers for slabs allow."""
    for warps, per_thread, lag, ahead in product((4, 8), (8, 16), (1, 2, 3), (1, 2)):
        block = 32 * warps * per_thread
        for resident_warps in (8, 12, 16, 20, 24):
            per_sm = resident_warps // warps
            if resident_warps % warps or cols > block * per_sm * _MULTIPROCESSORS:
                continue
            if 20 + (4 + itemsize // 2) * per_thread <= 2048 // resident_warps:
                yield LayerNormBackwardCooperative(block, warps, per_sm, lag, ahead)


def _round_up_to_power_of_2(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
