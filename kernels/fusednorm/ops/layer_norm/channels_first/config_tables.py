"""Launch tables of LayerNorm and RMSNorm over the channels of contiguous samples.

They are indexed by the size of an element of x in bytes, and by the most bytes that a thread reads at once, which
the number of positions determines: 16, 8, or at most 4 (`NARROWEST`).  An entry is used for all numbers of channels
up to its own, so the number of compiled kernels is bounded.  For more channels than the last entry has, x is read
twice.
"""

from fusednorm.ops.layer_norm.channels_first.backward.split import ChannelsFirstBackwardSplit
from fusednorm.ops.layer_norm.channels_first.backward.tile import ChannelsFirstBackwardTile
from fusednorm.ops.layer_norm.channels_first.forward.sweep import ChannelsFirstForwardSweep
from fusednorm.ops.layer_norm.channels_first.forward.tile import ChannelsFirstForwardTile

NARROWEST = 4
"""The bytes of an access in the tables for all that are no more."""

FORWARD: dict[tuple[int, int], tuple[tuple[int, ChannelsFirstForwardTile], ...]] = {
    (2, 16): (
        (64, ChannelsFirstForwardTile(64, num_warps=4, programs_per_sm=6)),
        (128, ChannelsFirstForwardTile(64, num_warps=8, programs_per_sm=3)),
        (256, ChannelsFirstForwardTile(32, num_warps=8, programs_per_sm=3)),
        (512, ChannelsFirstForwardTile(16, num_warps=8, programs_per_sm=3)),
        (1024, ChannelsFirstForwardTile(16, num_warps=16, programs_per_sm=1)),
        (2048, ChannelsFirstForwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (2, 8): (
        (64, ChannelsFirstForwardTile(64, num_warps=4, programs_per_sm=6)),
        (128, ChannelsFirstForwardTile(32, num_warps=4, programs_per_sm=6)),
        (256, ChannelsFirstForwardTile(32, num_warps=8, programs_per_sm=3)),
        (512, ChannelsFirstForwardTile(16, num_warps=8, programs_per_sm=3)),
        (1024, ChannelsFirstForwardTile(16, num_warps=16, programs_per_sm=1)),
        (2048, ChannelsFirstForwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (2, NARROWEST): (
        (128, ChannelsFirstForwardTile(16, num_warps=4, programs_per_sm=5)),
        (512, ChannelsFirstForwardTile(16, num_warps=8, programs_per_sm=2)),
        (1024, ChannelsFirstForwardTile(16, num_warps=16, programs_per_sm=1)),
        (2048, ChannelsFirstForwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (4, 16): (
        (128, ChannelsFirstForwardTile(32, num_warps=4, programs_per_sm=5)),
        (256, ChannelsFirstForwardTile(32, num_warps=8, programs_per_sm=2)),
        (512, ChannelsFirstForwardTile(16, num_warps=8, programs_per_sm=2)),
        (1024, ChannelsFirstForwardTile(16, num_warps=16, programs_per_sm=1)),
        (2048, ChannelsFirstForwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (4, 8): (
        (128, ChannelsFirstForwardTile(32, num_warps=4, programs_per_sm=5)),
        (256, ChannelsFirstForwardTile(16, num_warps=4, programs_per_sm=5)),
        (512, ChannelsFirstForwardTile(16, num_warps=8, programs_per_sm=2)),
        (1024, ChannelsFirstForwardTile(16, num_warps=16, programs_per_sm=1)),
        (2048, ChannelsFirstForwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (4, NARROWEST): (
        (128, ChannelsFirstForwardTile(16, num_warps=4, programs_per_sm=5)),
        (512, ChannelsFirstForwardTile(16, num_warps=8, programs_per_sm=2)),
        (1024, ChannelsFirstForwardTile(16, num_warps=16, programs_per_sm=1)),
        (2048, ChannelsFirstForwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
}
FORWARD_SWEEP = ChannelsFirstForwardSweep(32, num_warps=8)

BACKWARD: dict[tuple[int, int], tuple[tuple[int, ChannelsFirstBackwardTile], ...]] = {
    (2, 16): (
        (64, ChannelsFirstBackwardTile(64, num_warps=4, programs_per_sm=4)),
        (128, ChannelsFirstBackwardTile(64, num_warps=8, programs_per_sm=2)),
        (256, ChannelsFirstBackwardTile(32, num_warps=8, programs_per_sm=2)),
        (512, ChannelsFirstBackwardTile(16, num_warps=8, programs_per_sm=2)),
        (1024, ChannelsFirstBackwardTile(16, num_warps=16, programs_per_sm=1)),
    ),
    (2, 8): (
        (128, ChannelsFirstBackwardTile(32, num_warps=4, programs_per_sm=4)),
        (256, ChannelsFirstBackwardTile(32, num_warps=8, programs_per_sm=2)),
        (512, ChannelsFirstBackwardTile(16, num_warps=8, programs_per_sm=2)),
        (1024, ChannelsFirstBackwardTile(16, num_warps=16, programs_per_sm=1)),
    ),
    (2, NARROWEST): (
        (256, ChannelsFirstBackwardTile(16, num_warps=8, programs_per_sm=2)),
        (512, ChannelsFirstBackwardTile(16, num_warps=16, programs_per_sm=1)),
        (1024, ChannelsFirstBackwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (4, 16): (
        (64, ChannelsFirstBackwardTile(32, num_warps=4, programs_per_sm=4)),
        (128, ChannelsFirstBackwardTile(32, num_warps=8, programs_per_sm=2)),
        (256, ChannelsFirstBackwardTile(16, num_warps=8, programs_per_sm=2)),
        (512, ChannelsFirstBackwardTile(16, num_warps=16, programs_per_sm=1)),
        (1024, ChannelsFirstBackwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (4, 8): (
        (64, ChannelsFirstBackwardTile(32, num_warps=4, programs_per_sm=4)),
        (256, ChannelsFirstBackwardTile(16, num_warps=8, programs_per_sm=2)),
        (512, ChannelsFirstBackwardTile(16, num_warps=16, programs_per_sm=1)),
        (1024, ChannelsFirstBackwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (4, NARROWEST): (
        (256, ChannelsFirstBackwardTile(16, num_warps=8, programs_per_sm=2)),
        (512, ChannelsFirstBackwardTile(16, num_warps=16, programs_per_sm=1)),
        (1024, ChannelsFirstBackwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
}
BACKWARD_SPLIT = ChannelsFirstBackwardSplit(32, num_warps=8, programs_per_sm=4)
