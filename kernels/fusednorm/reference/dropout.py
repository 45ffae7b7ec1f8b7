"""Dropout after the affine step, in plain torch; the tests compare the kernels of `jit.epilogue` with it."""

import torch
from torch import Tensor

from fusednorm.arguments.dropout import PHILOX_ROUNDS, compute_dropout_threshold

_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def compute_philox_words(seed: int, row: Tensor, quad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute four random words, int64 in [0, 2^32), for each quad, which is four adjacent positions of a row.

    `fusednorm.arguments.dropout` defines them.

    Args:
        seed: int64.
        row: int64, broadcasts against quad.
        quad: int64, the position divided by four.
    """
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    row, quad = row + torch.zeros_like(quad), quad + torch.zeros_like(row)
    c0, c1, c2, c3 = quad & _WORD, row & _WORD, (row >> 32) & _WORD, torch.zeros_like(quad)
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply_words(c0, _PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply_words(c2, _PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _PHILOX_KEY_STEPS[0]) & _WORD, (k1 + _PHILOX_KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def compute_dropout_mask(seed: int, rows: int, positions: int, p: float, device: torch.device | str) -> Tensor:
    """Compute whether dropout keeps each element of [rows, positions], as a bool tensor."""
    row = torch.arange(rows, dtype=torch.int64, device=device)[:, None]
    quad = torch.arange((positions + 3) // 4, dtype=torch.int64, device=device)[None, :]
    words = torch.stack(compute_philox_words(seed, row, quad), dim=-1).reshape(rows, -1)
    return words[:, :positions] >= compute_dropout_threshold(p)


def _multiply_words(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Compute high and low words of a 32 x 32-bit product; halves keep every step inside a signed int64."""
    upper = a * (multiplier >> 16) + ((a * (multiplier & 0xFFFF)) >> 16)
    return upper >> 16, (a * multiplier) & _WORD
