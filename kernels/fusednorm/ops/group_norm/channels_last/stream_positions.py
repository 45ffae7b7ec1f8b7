"""Complete positions of channels-last samples, for the kernels that stream them.

A tile is [LANES, VEC]: one lane per thread, which loads a vector of VEC adjacent columns (channels) at once.
`units` adjacent lanes hold all columns of one position, the next `units` lanes those of the next position.  A lane
has the same columns at all positions.

Remaining lanes, too few for another position, are idle: they have the position of the last lanes.
"""

import triton
import triton.language as tl


@triton.jit
def locate_lanes(units, LANES: tl.constexpr, VEC: tl.constexpr):
    """Compute each lane's position in a tile, [LANES, 1], and the columns that it loads, [LANES, VEC].

    Also returns the number of positions in a tile.  `units` is the number of lanes of one position.
    """
    lane = tl.arange(0, LANES)[:, None]
    positions = LANES // units
    position = tl.minimum(lane // units, positions - 1)
    return position, (lane % units) * VEC + tl.arange(0, VEC)[None, :], positions


@triton.jit
def count_steps_and_last_positions(split, hw, splits, step):
    """Count the steps of one split of a sample, and the positions in the last of these steps.

    A step is `step` positions, and a split is every `splits`th step.
    """
    all_steps = tl.cdiv(hw, step)
    steps = tl.cdiv(all_steps - split, splits)
    return steps, tl.minimum(hw - (split + (steps - 1) * splits) * step, step)


@triton.jit
def load_clamped_positions(
    ptr, start, column, c, position, positions, left,
    CHUNKS: tl.constexpr, WHOLE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Load CHUNKS tiles [LANES, VEC] from ptr + start on.  Where a position does not exist, the last one is
    loaded instead.

    The result is () if ptr is None.  A position has c columns.  Tiles have the dtype of memory.  `position` and
    `column` are those of `locate_lanes`.

    Unless the tiles are WHOLE, `left` positions exist, 1 or more, and the last one replaces those that do
    not exist.  Nothing is masked, because ptxas places a masked load after the arithmetic of the previous
    load.
    """
    tiles = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            if WHOLE:
                at = start + i * (positions * c) + (position * c + column)
            else:
                at = start + tl.minimum(position + i * positions, left - 1) * c + column
            tiles = tiles + (tl.load(ptr + at, eviction_policy=EVICT),)
    return tiles


@triton.jit
def make_position_mask(position, positions, left, i: tl.constexpr, WHOLE: tl.constexpr):
    """Make the mask of lanes whose position exists in tile i of a fragment, [LANES, 1].

    If all exist (WHOLE), it is a constant that the compiler removes.
    """
    if WHOLE:
        return tl.full(position.shape, True, tl.int1)
    else:
        return position + i * positions < left


@triton.jit
def make_store_mask(position, positions, units, left, i: tl.constexpr, WHOLE: tl.constexpr, IDLE: tl.constexpr):
    """Make the mask of lanes that store an element of tile i, [LANES, 1].

    A lane stores if its position exists and the lane is not idle.  Idle lanes are those left over after the
    last complete position.
    """
    mask = make_position_mask(position, positions, left, i, WHOLE)
    if IDLE:
        mask = mask & (tl.arange(0, position.shape[0])[:, None] < positions * units)
    return mask
