"""Launch tables of LayerNorm and RMSNorm over the channels of contiguous samples.

They are indexed by the size of an element of x in bytes, and by the most bytes that a thread reads at once, which
the number of positions determines: 16, 8, or at most 4 (`NARROWEST`).  An entry is used for all numbers of channels
up to its own, so the number of compiled kernels is bounded.  For more channels than the last entry has, x is read
twice.

Comments have the fractions of a copy that an H100 reached in bfloat16.  The fastest programs have few warps, and a
thread holds about 32 registers of x; narrow accesses take a register for each element.  The other entries follow
this rule: tiles of float32 have half as many positions.
"""

from fusednorm.ops.layer_norm.channels_first.backward.split import ChannelsFirstBackwardSplit
from fusednorm.ops.layer_norm.channels_first.backward.tile import ChannelsFirstBackwardTile
from fusednorm.ops.layer_norm.channels_first.forward.sweep import ChannelsFirstForwardSweep
from fusednorm.ops.layer_norm.channels_first.forward.tile import ChannelsFirstForwardTile

NARROWEST = 4
"""The bytes of an access in the tables for all that are no more."""

FORWARD: dict[tuple[int, int], tuple[tuple[int, ChannelsFirstForwardTile], ...]] = {
    (2, 16): (
        (64, ChannelsFirstForwardTile(64, num_warps=2, programs_per_sm=8)),
        (96, ChannelsFirstForwardTile(64, num_warps=2, programs_per_sm=4)),  # 0.95: 96x256x256
        (128, ChannelsFirstForwardTile(64, num_warps=4, programs_per_sm=4)),  # 0.86: 128x56x56
        (192, ChannelsFirstForwardTile(32, num_warps=2, programs_per_sm=6)),  # 0.80: 192x48x48
        (256, ChannelsFirstForwardTile(16, num_warps=2, programs_per_sm=8)),  # 0.80: 256x28x28
        (384, ChannelsFirstForwardTile(16, num_warps=4, programs_per_sm=4)),
        (512, ChannelsFirstForwardTile(32, num_warps=8, programs_per_sm=2)),
        (1024, ChannelsFirstForwardTile(16, num_warps=8, programs_per_sm=2)),  # 0.80: 768x32x32
        (2048, ChannelsFirstForwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (2, 8): (
        (64, ChannelsFirstForwardTile(64, num_warps=2, programs_per_sm=8)),
        (128, ChannelsFirstForwardTile(32, num_warps=2, programs_per_sm=8)),
        (256, ChannelsFirstForwardTile(32, num_warps=4, programs_per_sm=4)),
        (512, ChannelsFirstForwardTile(32, num_warps=8, programs_per_sm=2)),  # 0.71: 512x14x14
        (1024, ChannelsFirstForwardTile(16, num_warps=8, programs_per_sm=2)),
        (2048, ChannelsFirstForwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (2, NARROWEST): (
        (128, ChannelsFirstForwardTile(16, num_warps=4, programs_per_sm=6)),
        (256, ChannelsFirstForwardTile(16, num_warps=4, programs_per_sm=4)),
        (512, ChannelsFirstForwardTile(16, num_warps=8, programs_per_sm=2)),
        (1024, ChannelsFirstForwardTile(16, num_warps=16, programs_per_sm=1)),  # 0.66: 1024x7x7
        (2048, ChannelsFirstForwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (4, 16): (
        (64, ChannelsFirstForwardTile(32, num_warps=2, programs_per_sm=8)),
        (96, ChannelsFirstForwardTile(32, num_warps=2, programs_per_sm=4)),
        (128, ChannelsFirstForwardTile(32, num_warps=4, programs_per_sm=4)),
        (192, ChannelsFirstForwardTile(16, num_warps=2, programs_per_sm=6)),
        (256, ChannelsFirstForwardTile(8, num_warps=2, programs_per_sm=8)),
        (384, ChannelsFirstForwardTile(8, num_warps=4, programs_per_sm=4)),
        (512, ChannelsFirstForwardTile(16, num_warps=8, programs_per_sm=2)),
        (1024, ChannelsFirstForwardTile(8, num_warps=8, programs_per_sm=2)),
        (2048, ChannelsFirstForwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (4, 8): (
        (64, ChannelsFirstForwardTile(32, num_warps=2, programs_per_sm=8)),
        (128, ChannelsFirstForwardTile(16, num_warps=2, programs_per_sm=8)),
        (256, ChannelsFirstForwardTile(16, num_warps=4, programs_per_sm=4)),
        (512, ChannelsFirstForwardTile(16, num_warps=8, programs_per_sm=2)),
        (1024, ChannelsFirstForwardTile(8, num_warps=8, programs_per_sm=2)),
        (2048, ChannelsFirstForwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
    (4, NARROWEST): (
        (128, ChannelsFirstForwardTile(16, num_warps=4, programs_per_sm=6)),
        (256, ChannelsFirstForwardTile(16, num_warps=4, programs_per_sm=4)),
        (512, ChannelsFirstForwardTile(16, num_warps=8, programs_per_sm=2)),
        (1024, ChannelsFirstForwardTile(16, num_warps=16, programs_per_sm=1)),
        (2048, ChannelsFirstForwardTile(8, num_warps=16, programs_per_sm=1)),
    ),
}
FORWARD_SWEEP = ChannelsFirstForwardSweep(32, num_warps=8)

BACKWARD: dict[tuple[int, int], tuple[tuple[int, ChannelsFirstBackwardTile], ...]] = {
    (2, 16): (
        (64, ChannelsFirstBackwardTile(64, num_warps=4, programs_per_sm=4)),
        (96, ChannelsFirstBackwardTile(64, num_warps=4, programs_per_sm=3)),  # 0.89: 96x256x256
        (128, ChannelsFirstBackwardTile(64, num_warps=4, programs_per_sm=2)),  # 0.85: 128x56x56
        (192, ChannelsFirstBackwardTile(32, num_warps=4, programs_per_sm=3)),  # 0.76: 192x48x48
        (256, ChannelsFirstBackwardTile(32, num_warps=8, programs_per_sm=2)),  # 0.73: 256x28x28
        (384, ChannelsFirstBackwardTile(16, num_warps=4, programs_per_sm=3)),
        (512, ChannelsFirstBackwardTile(16, num_warps=8, programs_per_sm=2)),
        (768, ChannelsFirstBackwardTile(32, num_warps=16, programs_per_sm=1)),  # 0.72: 768x32x32
        (1024, ChannelsFirstBackwardTile(16, num_warps=16, programs_per_sm=1)),
    ),
    (2, 8): (
        (128, ChannelsFirstBackwardTile(32, num_warps=4, programs_per_sm=4)),
        (256, ChannelsFirstBackwardTile(32, num_warps=8, programs_per_sm=2)),
        (512, ChannelsFirstBackwardTile(16, num_warps=8, programs_per_sm=2)),  # 0.61: 512x14x14
        (1024, ChannelsFirstBackwardTile(16, num_warps=16, programs_per_sm=1)),
    ),
    (2, NARROWEST): (
        (256, ChannelsFirstBackwardTile(16, num_warps=8, programs_per_sm=2)),
        (512, ChannelsFirstBackwardTile(16, num_warps=16, programs_per_sm=1)),
        (1024, ChannelsFirstBackwardTile(8, num_warps=8, programs_per_sm=1)),  # 0.53: 1024x7x7
    ),
    (4, 16): (
        (64, ChannelsFirstBackwardTile(32, num_warps=4, programs_per_sm=4)),
        (96, ChannelsFirstBackwardTile(32, num_warps=4, programs_per_sm=3)),
        (128, ChannelsFirstBackwardTile(32, num_warps=4, programs_per_sm=2)),
        (192, ChannelsFirstBackwardTile(16, num_warps=4, programs_per_sm=3)),
        (256, ChannelsFirstBackwardTile(16, num_warps=8, programs_per_sm=2)),
        (384, ChannelsFirstBackwardTile(8, num_warps=4, programs_per_sm=3)),
        (512, ChannelsFirstBackwardTile(8, num_warps=8, programs_per_sm=2)),
        (768, ChannelsFirstBackwardTile(16, num_warps=16, programs_per_sm=1)),
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
        (1024, ChannelsFirstBackwardTile(8, num_warps=8, programs_per_sm=1)),
    ),
}
BACKWARD_SPLIT = ChannelsFirstBackwardSplit(32, num_warps=8, programs_per_sm=4)
