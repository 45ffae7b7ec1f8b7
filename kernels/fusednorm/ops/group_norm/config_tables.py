"""Launch configurations of GroupNorm by class of groups, one per line, by bytes of an element.

`benchmarks.tune.group_norm` measures the candidates for these tables.  An entry of FORWARD_CONTIGUOUS is for every
group up to its number of elements.  Entries of the other tables are for groups with its number of channels, up to
its number of positions; for streamed samples, for all samples with its number of channels and about its number of
positions (`find_measured_stream`).  The first entry that fits the sample and the device is used; for classes
without an entry `forward_choice` and `backward_choice` choose the configuration that wastes the least.
"""

from fusednorm.ops.group_norm.channels_last.backward.stream import BackwardSampleStream
from fusednorm.ops.group_norm.channels_last.forward.cooperative import ForwardCooperativeBlock
from fusednorm.ops.group_norm.channels_last.forward.resident import ForwardResidentBlock
from fusednorm.ops.group_norm.channels_last.forward.stream import ForwardSampleStream
from fusednorm.ops.group_norm.contiguous.backward.cooperative import GroupNormBackwardCooperative
from fusednorm.ops.group_norm.contiguous.forward.cooperative import GroupNormForwardCooperative
from fusednorm.ops.group_norm.contiguous.forward.resident import GroupNormForwardResident

Contiguous = GroupNormForwardResident | GroupNormForwardCooperative
ChannelsLast = ForwardResidentBlock | ForwardCooperativeBlock

# A thread holds up to 64 elements; the number of warps leaves registers for at least two programs on a
# multiprocessor.  For larger groups the programs that share one read it again from L1 or L2, and 64 KB per
# multiprocessor are being loaded.
FORWARD_CONTIGUOUS: dict[int, tuple[tuple[int, Contiguous], ...]] = {
    2: (
        # 0.80-0.83 (2x640x32x32, 2x1280x16x16)
        (24576, GroupNormForwardResident(8, programs_per_sm=3)),
        # 0.91 (32x256x56x56)
        (32768, GroupNormForwardResident(8, programs_per_sm=2, prefetch_distance_per_sm=1)),
        # 0.90 (16x320x64x64), 0.82 (2x320x64x64; 0.78 if one program writes a group)
        (49152, GroupNormForwardResident(8, programs_per_sm=2, writers=2, prefetch_distance_per_sm=1)),
        # 0.87 (8x512x64x64)
        (65536, GroupNormForwardResident(16, programs_per_sm=1, prefetch_distance_per_sm=1)),
        # 0.80 (8x640x64x64)
        (131072, GroupNormForwardCooperative(8, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),
        # 0.85 (1x512x128x128)
        (262144, GroupNormForwardCooperative(16, num_warps=4, programs_per_sm=4, lag=0, ahead=1)),
        # 0.78 (2x960x128x128)
        (491520, GroupNormForwardCooperative(6, num_warps=4, programs_per_sm=5, lag=2, ahead=1)),
        # 0.83 (4x256x256x256)
        (524288, GroupNormForwardCooperative(8, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),
        # 0.69-0.78 (4x128x512x512)
        (2**22, GroupNormForwardCooperative(8, num_warps=8, programs_per_sm=2, lag=2, ahead=1)),
        # 0.73 (1x128x20x256x256)
        (2**31, GroupNormForwardCooperative(10, num_warps=8, programs_per_sm=2, lag=2, ahead=1)),
    ),
    4: (
        (12288, GroupNormForwardResident(8, programs_per_sm=2, writers=2)),
        (24576, GroupNormForwardResident(16, programs_per_sm=1, writers=2)),
        (32768, GroupNormForwardResident(16, programs_per_sm=1, writers=2, prefetch_distance_per_sm=1)),
        # 0.86 (16x320x64x64)
        (524288, GroupNormForwardCooperative(4, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),
        (2**31, GroupNormForwardCooperative(4, num_warps=8, programs_per_sm=2, lag=2, ahead=1)),
    ),
}

# Blocks of whole groups of 64 bytes or more that leave few lanes idle, held in registers while their programs wait.
FORWARD_CHANNELS_LAST: dict[int, tuple[tuple[int, int, ChannelsLast], ...]] = {
    2: (
        # 0.71 (1x512x128x128)
        (16, 16384, ForwardCooperativeBlock(4, 16, num_warps=4, programs_per_sm=2, lag=1, ahead=1)),
        # 0.63 (2x1280x16x16)
        (40, 256, ForwardResidentBlock(3, num_warps=16, programs_per_sm=1, writers=4)),
    ),
    4: (),
}

# Parts that are filled by whole channels; four programs of four warps on a multiprocessor.
BACKWARD_CONTIGUOUS: dict[int, tuple[tuple[int, int, GroupNormBackwardCooperative], ...]] = {
    2: (
        # Each channel a group, on an H100: 0.89 (2x128x24^3), 0.93 (4x64x128^2), 0.83 (2x64x48^3, 4x32x64^3), 0.80
        # (2x32x96^3)
        (1, 884736, GroupNormBackwardCooperative(1, 4, 1, num_warps=8, programs_per_sm=2, lag=1, ahead=1)),
        # The same: 0.83 (2x32x128^3)
        (1, 2097152, GroupNormBackwardCooperative(1, 4, 1, num_warps=8, programs_per_sm=2, lag=2, ahead=1)),
        # 0.71 (4x128x512x512)
        (4, 262144, GroupNormBackwardCooperative(1, 4, 1, num_warps=8, programs_per_sm=2, lag=2, ahead=1)),
        # 0.72
        (4, 1048576, GroupNormBackwardCooperative(1, 2, 4, num_warps=8, programs_per_sm=2, lag=2, ahead=1)),
        # 0.67
        (4, 1310720, GroupNormBackwardCooperative(1, 2, 5, num_warps=8, programs_per_sm=2, lag=2, ahead=1)),
        # 0.69 (32x256x56x56)
        (8, 3136, GroupNormBackwardCooperative(8, 5, 1, num_warps=4, programs_per_sm=4, lag=1, ahead=1)),
        # 0.74 (4x256x256x256)
        (8, 65536, GroupNormBackwardCooperative(1, 2, 2, num_warps=4, programs_per_sm=5, lag=2, ahead=1)),
        # 0.75 (16x320x64x64)
        (10, 4096, GroupNormBackwardCooperative(1, 4, 1, num_warps=4, programs_per_sm=4, lag=1, ahead=1)),
        # 0.74 (8x512x64x64)
        (16, 4096, GroupNormBackwardCooperative(1, 4, 1, num_warps=4, programs_per_sm=4, lag=1, ahead=1)),
        # 0.65 (1x512x128x128)
        (16, 16384, GroupNormBackwardCooperative(1, 4, 1, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),
        # 0.83 (2x640x32x32)
        (20, 1024, GroupNormBackwardCooperative(4, 4, 1, num_warps=4, programs_per_sm=3, lag=2, ahead=1)),
        # 0.71 (2x960x128x128)
        (30, 16384, GroupNormBackwardCooperative(1, 4, 1, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),
        # 0.77 (2x1280x16x16)
        (40, 256, GroupNormBackwardCooperative(8, 2, 1, num_warps=4, programs_per_sm=3, lag=2, ahead=1)),
    ),
    4: (
        # 0.76
        (4, 262144, GroupNormBackwardCooperative(1, 4, 1, num_warps=8, programs_per_sm=2, lag=2, ahead=1)),
        # 0.74
        (8, 3136, GroupNormBackwardCooperative(8, 5, 1, num_warps=4, programs_per_sm=4, lag=1, ahead=1)),
        # 0.75
        (8, 65536, GroupNormBackwardCooperative(1, 4, 1, num_warps=8, programs_per_sm=2, lag=2, ahead=1)),
        # 0.81 (16x320x64x64)
        (10, 4096, GroupNormBackwardCooperative(1, 2, 2, num_warps=4, programs_per_sm=5, lag=2, ahead=1)),
        # 0.76
        (16, 4096, GroupNormBackwardCooperative(1, 2, 2, num_warps=4, programs_per_sm=5, lag=2, ahead=1)),
        # 0.75
        (16, 16384, GroupNormBackwardCooperative(1, 4, 1, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),
        # 0.69
        (30, 16384, GroupNormBackwardCooperative(1, 4, 1, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),
    ),
}

# With these splits the resident programs process the measured samples in one iteration, or in two.
FORWARD_STREAM: dict[int, tuple[tuple[int, int, ForwardSampleStream], ...]] = {
    2: (
        # 0.70 (16x128x64x64)
        (128, 4096, ForwardSampleStream(4, chunks=4, apply_chunks=4, splits=32)),
        # 0.64 (4x128x512x512)
        (128, 262144, ForwardSampleStream(4, chunks=8, apply_chunks=4, splits=256)),
        # 0.64 (1x128x1024x1024)
        (128, 2**21, ForwardSampleStream(4, chunks=8, apply_chunks=8, splits=512)),
        # 0.66 (32x256x56x56)
        (256, 4096, ForwardSampleStream(4, chunks=2, apply_chunks=8, splits=49)),
        # 0.63 (4x256x256x256)
        (256, 65536, ForwardSampleStream(4, chunks=8, apply_chunks=4, splits=256)),
        # 0.64 (16x320x64x64), 0.60 (2x320x64x64)
        (320, 4096, ForwardSampleStream(4, chunks=2, apply_chunks=8, splits=80)),
        # 0.66 (8x512x64x64)
        (512, 4096, ForwardSampleStream(4, chunks=4, apply_chunks=8, splits=128)),
        # 0.67 (16x640x32x32), 0.54 (2x640x32x32)
        (640, 1024, ForwardSampleStream(8, chunks=2, apply_chunks=4, splits=40)),
        # 0.63 (2x960x128x128)
        (960, 16384, ForwardSampleStream(8, chunks=4, apply_chunks=4, splits=320)),
    ),
    4: (),
}
# Measured with 4x128x512x512, 1x128x1024x1024 and a video, 32x256x56x56, 4x256x256x256, 16x320x64x64, 8x512x64x64,
# 1x512x128x128 and 2x960x128x128.
BACKWARD_STREAM: dict[int, tuple[tuple[int, int, BackwardSampleStream], ...]] = {
    2: (
        # 0.55
        (128, 262144, BackwardSampleStream(4, chunks=4, apply_chunks=4, apply_fragments=2, splits=256)),
        # 0.57-0.58
        (128, 2**21, BackwardSampleStream(4, chunks=4, apply_chunks=2, apply_fragments=4, splits=512)),
        # 0.55
        (256, 4096, BackwardSampleStream(4, chunks=4, apply_chunks=4, apply_fragments=2, splits=12)),
        # 0.55
        (256, 65536, BackwardSampleStream(4, chunks=4, apply_chunks=4, apply_fragments=2, splits=160)),
        # 0.56
        (320, 4096, BackwardSampleStream(4, chunks=2, apply_chunks=4, apply_fragments=2, splits=40)),
        # 0.58
        (512, 4096, BackwardSampleStream(4, chunks=4, apply_chunks=4, apply_fragments=1, splits=64)),
        # 0.54
        (512, 16384, BackwardSampleStream(4, chunks=4, apply_chunks=4, apply_fragments=2, splits=256)),
        # 0.53 (204x640x32x32), 0.55 (16x640x32x32 and 2x640x32x32)
        (640, 1024, BackwardSampleStream(8, chunks=4, apply_chunks=2, apply_fragments=4, splits=8)),
        # 0.55
        (960, 16384, BackwardSampleStream(4, chunks=4, apply_chunks=4, apply_fragments=2, splits=256)),
    ),
    4: (),
}
