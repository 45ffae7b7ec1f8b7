"""The dropout mask of any piece of a tensor: it depends only on row and position, not on the division of work."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusednorm.arguments.dropout import PHILOX_ROUNDS, compute_dropout_threshold

# Random words are computed four at once, as uint64; this many quads at a time stay in a core's cache.
_QUADS = 16 * 1024

_WORD = 0xFFFFFFFF
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85

_Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class DropoutMask:
    """A mask that drops each element with probability `p` in (0, 1); `seed` determines which elements."""

    p: float
    seed: int

    def compute(self, rows: range, positions: range) -> Tensor:
        """Compute whether each element at these rows and positions is kept, bool [rows, positions]."""
        mask = np.empty((len(rows), len(positions)), np.bool_)
        first = positions.start // 4
        quads = (positions.stop + 3) // 4 - first
        skipped = positions.start - 4 * first
        threshold = np.uint64(compute_dropout_threshold(self.p))
        for part, start, stop in _iterate_blocks(len(rows), quads):
            row = np.arange(rows.start + part.start, rows.start + part.stop, dtype=np.uint64)[:, None]
            quad = np.arange(first + start, first + stop, dtype=np.uint64)[None, :]
            kept = np.empty((row.size, quad.size, 4), np.bool_)
            for word, random in enumerate(_compute_philox_words(self.seed, row, quad)):
                np.greater_equal(random, threshold, out=kept[:, :, word])
            low, high = max(4 * start, skipped), min(4 * stop, skipped + len(positions))
            of_positions = slice(low - 4 * start, high - 4 * start)
            mask[part, low - skipped : high - skipped] = kept.reshape(row.size, -1)[:, of_positions]
        return torch.from_numpy(mask)

    def compute_factors(self, mask: Tensor) -> Tensor:
        """Compute the factors of y, float32: 0, or 1 / (1 - p)."""
        return mask.float().div_(1.0 - self.p)


def make_dropout_mask(p: float, seed: int | None) -> DropoutMask | None:
    """Make the dropout mask, or None if p is 0."""
    return DropoutMask(p, seed or 0) if p else None


def _iterate_blocks(rows: int, quads: int) -> Iterator[tuple[slice, int, int]]:
    """Yield blocks whose random words are computed at once: a range of rows, and the start and end of a range of
    quads.  A quad is four adjacent positions of a row; the end is excluded.
    """
    if quads <= _QUADS:
        step = _QUADS // quads
        return ((slice(start, min(start + step, rows)), 0, quads) for start in range(0, rows, step))
    return (
        (slice(row, row + 1), start, min(start + _QUADS, quads))
        for row in range(rows)
        for start in range(0, quads, _QUADS)
    )


def _compute_philox_words(seed: int, row: _Words, quad: _Words) -> tuple[_Words, _Words, _Words, _Words]:
    """Compute four random words for each quad, which is four adjacent positions of a row.

    `fusednorm.arguments.dropout` defines the words.

    Args: row, quad: [rows, 1] and [1, quads].
    """
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    shape = np.broadcast_shapes(row.shape, quad.shape)
    word, half = np.uint64(_WORD), np.uint64(32)
    c0, c1 = np.broadcast_to(quad & word, shape).copy(), np.broadcast_to(row & word, shape)
    c2, c3 = np.broadcast_to(row >> half, shape).copy(), np.zeros(shape, np.uint64)
    for _ in range(PHILOX_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        np.right_shift(product1, half, out=c0)
        c0 ^= c1
        c0 ^= np.uint64(k0)
        np.right_shift(product0, half, out=c2)
        c2 ^= c3
        c2 ^= np.uint64(k1)
        c1, c3 = np.bitwise_and(product1, word, out=product1), np.bitwise_and(product0, word, out=product0)
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3
