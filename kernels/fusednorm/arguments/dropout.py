"""The rule by which dropout keeps elements.

The mask is a pure function of (seed, row, position in the row), so it is the same on every device, in forward and
backward, and for any batch.  It is Philox-4x32 with seven rounds, the fewest that pass BigCrush (Salmon, Moraes,
Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC'11, table 2), with the counter (position // 4, row low,
row high, 0) and the key (seed low, seed high).  Word position % 4 of the four output words belongs to the element:
the element is kept when that word is at least `compute_dropout_threshold(p)`.
"""

PHILOX_ROUNDS = 7


def compute_dropout_threshold(p: float) -> int:
    """Compute the threshold of dropout: an element is kept if its random 32-bit word is at least this.

    P(word >= threshold) = 1 - p, with an error up to 2^-32.
    """
    return min(round(p * 2**32), 2**32 - 1)
