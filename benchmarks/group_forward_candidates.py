"""Launch configurations that may suit a GroupNorm forward pass: what `tune_group` times.

Bounds on registers are estimates of what the compiler makes of a kernel; they leave out what cannot be fast, not
everything that is slow.
"""

from collections.abc import Iterator
from itertools import product

from fusednorm.group_norm_forward_launch import (
    Forward,
    ForwardBlock,
    ForwardHeld,
    ForwardPieces,
    ForwardShared,
    ForwardSharedBlock,
    block_groups,
    block_tile,
    choose_forward,
    never_waiting,
    registers_for,
)
from fusednorm.group_norm_launch import Sample

_MULTIPROCESSORS = 132
"""Of an H200: programs that share a group must all be resident."""

_HELD_BYTES = 128 << 10
"""Groups up to as many bytes are held by one program."""


def candidates(sample: Sample, itemsize: int) -> Iterator[Forward]:
    """Configurations for samples of elements of `itemsize` bytes, each once."""
    found = dict.fromkeys(_candidates(sample, itemsize))
    yield from found


def _candidates(sample: Sample, itemsize: int) -> Iterator[Forward]:
    yield choose_forward(sample, itemsize, _MULTIPROCESSORS)
    yield never_waiting(sample, itemsize)
    if sample.channels_last:
        yield from blocks(sample, itemsize)
        yield from shared_blocks(sample, itemsize)
        for groups in block_groups(sample, itemsize)[:3]:
            yield from pieces(sample, itemsize, groups)
    else:
        yield from held(sample, itemsize)
        yield from shared(sample, itemsize)
        yield from pieces(sample, itemsize, 0)


def held(sample: Sample, itemsize: int) -> Iterator[ForwardHeld]:
    """Groups in the registers of one program; what is asked ahead, and by how many it is written."""
    if sample.group_length * itemsize > _HELD_BYTES:
        return
    for warps, programs_per_sm in product((4, 8, 16, 32), (1, 2, 3, 4, 5, 6, 8)):
        chunks = -(-sample.group_length // (256 * warps))
        config = ForwardHeld(warps, programs_per_sm)
        if chunks <= 32 and _fits(config, chunks * 2 * itemsize):
            for writers, ahead_per_sm in ((1, 0), (1, 1), (1, 2), (2, 0), (4, 0)):
                yield ForwardHeld(warps, programs_per_sm, writers, ahead_per_sm)


def shared(sample: Sample, itemsize: int) -> Iterator[ForwardShared]:
    """Slabs that divide a group evenly where any do, in registers or read again some groups later."""
    if sample.group_length * itemsize <= 32 << 10:
        return
    found = [
        config
        for chunks, warps, programs_per_sm, lag in product(
            (2, 4, 5, 8, 10, 12, 16), (4, 8, 16), (1, 2, 3, 4, 5, 6), (0, 1, 2, 3)
        )
        if _fits(
            config := ForwardShared(chunks * 2 // itemsize, warps, programs_per_sm, lag, 1),
            (1 if lag == 0 else 2) * config.chunks * 2 * itemsize,
        )
        and 1 < config.members(sample) <= _MULTIPROCESSORS * programs_per_sm
        and config.chunks > 0
    ]
    even = [config for config in found if sample.group_length % (config.chunks * config.block) == 0]
    yield from even or found


def blocks(sample: Sample, itemsize: int) -> Iterator[ForwardBlock]:
    """Blocks of columns in the registers of one program."""
    for groups, warps, programs_per_sm in product(block_groups(sample, itemsize)[:4], (4, 8, 16), (1, 2, 3, 4, 6)):
        chunks = -(-sample.hw // block_tile(sample, groups, warps, itemsize).rows)
        config = ForwardBlock(groups, warps, programs_per_sm)
        if chunks <= 20 and _fits(config, chunks * 4, sums=16):
            for writers in (1, 2, 4):
                yield ForwardBlock(groups, warps, programs_per_sm, writers)


def shared_blocks(sample: Sample, itemsize: int) -> Iterator[ForwardSharedBlock]:
    """Pieces of as many positions for each program, in registers or read again some blocks later."""
    for groups, warps, programs_per_sm, lag in product(
        block_groups(sample, itemsize)[:3], (4, 8, 16), (1, 2, 3, 4), (0, 1, 2)
    ):
        rows = block_tile(sample, groups, warps, itemsize).rows
        for most in (16, 8) if lag == 0 else (8,):
            members = -(-sample.hw // (most * rows))
            config = ForwardSharedBlock(groups, -(-sample.hw // (members * rows)), warps, programs_per_sm, lag, 1)
            if (
                _fits(config, (1 if lag == 0 else 2) * config.chunks * 4, sums=16)
                and 1 < config.members(sample, itemsize) <= _MULTIPROCESSORS * programs_per_sm
            ):
                yield config


def pieces(sample: Sample, itemsize: int, groups: int) -> Iterator[ForwardPieces]:
    """Two sweeps, for samples beyond what one multiprocessor holds."""
    if sample.c * sample.hw * itemsize < 4 << 20:
        return
    for chunks, warps, programs_per_sm in product((4, 8, 16), (4, 8), (2, 3, 4, 5, 6)):
        config = ForwardPieces(chunks, warps, programs_per_sm, groups)
        if _fits(config, chunks * 4, sums=8):
            yield config


def _fits(
    config: ForwardHeld | ForwardShared | ForwardBlock | ForwardSharedBlock | ForwardPieces,
    held: int,
    sums: int = 0,
) -> bool:
    """Whether the registers hold what a thread does and some 20 to 90 more, at 8 warps a multiprocessor or more."""
    rest = registers_for(config) - held - sums
    return 20 <= rest <= 90 and 8 <= config.num_warps * config.programs_per_sm <= 32
