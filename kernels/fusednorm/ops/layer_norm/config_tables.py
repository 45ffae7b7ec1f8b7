"""Launch tables of LayerNorm and RMSNorm: the fastest configuration for each row length.

They are indexed by the size of an element of x in bytes.  An entry is used for all rows up to its number of
columns, so the number of compiled kernels is bounded.
"""

from fusednorm.ops.layer_norm.backward.cooperative import LayerNormBackwardCooperative
from fusednorm.ops.layer_norm.backward.split import LayerNormBackwardSplit
from fusednorm.ops.layer_norm.backward.tile import LayerNormBackwardTile
from fusednorm.ops.layer_norm.forward.cooperative import LayerNormForwardCooperative
from fusednorm.ops.layer_norm.forward.resident import LayerNormForwardResident
from fusednorm.ops.layer_norm.forward.split import LayerNormForwardSplit
from fusednorm.ops.layer_norm.forward.sweep import LayerNormForwardSweep
from fusednorm.ops.layer_norm.forward.tile import LayerNormForwardTile

ForwardConfig = (
    LayerNormForwardTile
    | LayerNormForwardResident
    | LayerNormForwardSweep
    | LayerNormForwardCooperative
    | LayerNormForwardSplit
)
BackwardConfig = LayerNormBackwardTile | LayerNormBackwardCooperative | LayerNormBackwardSplit

# Measured on an H200 (`benchmarks.tune.layer_norm`), x of 256 MiB; comments are fractions of a copy's speed.
# Entries with the comment H100 were fastest there for x of 6, 38 and 268 MB together, with parameters and with a
# scale and a shift for each sample: up to 0.16 of a copy's speed faster than the entries before.
FORWARD: dict[int, tuple[tuple[int, ForwardConfig], ...]] = {
    2: (
        (16, LayerNormForwardTile(32, 1, 16, num_warps=2)),
        (64, LayerNormForwardTile(32, 1, 64, num_warps=4)),
        (128, LayerNormForwardTile(32, 1, 128, num_warps=4)),  # 0.97
        (192, LayerNormForwardTile(32, 3, 64, num_warps=4, stages=3, programs_per_sm=4)),  # 1.03 on an H100
        (256, LayerNormForwardTile(8, 1, 256, num_warps=4)),  # 0.94
        (384, LayerNormForwardTile(4, 3, 128, num_warps=2)),  # H100
        (512, LayerNormForwardTile(2, 1, 512, num_warps=1)),  # 1.00
        (768, LayerNormForwardTile(2, 3, 256, num_warps=1)),  # 1.02
        (1024, LayerNormForwardTile(2, 2, 512, num_warps=2)),  # H100
        (1536, LayerNormForwardTile(1, 3, 512, num_warps=1)),  # 1.02
        (2048, LayerNormForwardResident(4, num_warps=2, programs_per_sm=8, prefetch_distance_per_sm=2)),  # 1.01
        (2560, LayerNormForwardResident(5, num_warps=2, programs_per_sm=10, prefetch_distance_per_sm=2)),  # 1.00
        (3072, LayerNormForwardResident(3, num_warps=4, programs_per_sm=5, prefetch_distance_per_sm=2)),  # 1.01
        (3584, LayerNormForwardTile(1, 7, 512, num_warps=2)),  # 1.01
        (4096, LayerNormForwardResident(4, num_warps=4, programs_per_sm=4, prefetch_distance_per_sm=2)),  # 1.00
        (5120, LayerNormForwardResident(5, num_warps=4, programs_per_sm=4, prefetch_distance_per_sm=2)),  # 1.00
        (6144, LayerNormForwardResident(6, num_warps=4, programs_per_sm=4, prefetch_distance_per_sm=2)),  # 1.00
        (7168, LayerNormForwardResident(7, num_warps=4, programs_per_sm=5, prefetch_distance_per_sm=1)),  # 1.00
        (8192, LayerNormForwardResident(4, num_warps=8, programs_per_sm=3, prefetch_distance_per_sm=2)),  # 1.00
        (10240, LayerNormForwardResident(5, num_warps=8, programs_per_sm=3, prefetch_distance_per_sm=1)),  # 1.00
        (12288, LayerNormForwardResident(6, num_warps=8, programs_per_sm=3, prefetch_distance_per_sm=1)),  # 1.00
        (14336, LayerNormForwardResident(7, num_warps=8, programs_per_sm=3, prefetch_distance_per_sm=1)),  # 1.00
        (16384, LayerNormForwardResident(8, num_warps=8, programs_per_sm=2, prefetch_distance_per_sm=1)),  # 0.99
        (20480, LayerNormForwardResident(5, num_warps=16, programs_per_sm=2, prefetch_distance_per_sm=1)),  # 0.99
        (24576, LayerNormForwardResident(6, num_warps=16, programs_per_sm=2, prefetch_distance_per_sm=1)),  # 0.98
        (32768, LayerNormForwardResident(8, num_warps=16, programs_per_sm=2, prefetch_distance_per_sm=1)),  # 0.98
        (49152, LayerNormForwardResident(6, num_warps=32, programs_per_sm=1, prefetch_distance_per_sm=1)),  # 0.95
        (65536, LayerNormForwardResident(8, num_warps=32, programs_per_sm=1, prefetch_distance_per_sm=1)),  # 0.91
        (524288, LayerNormForwardCooperative(4, num_warps=4, programs_per_sm=5, lag=2, ahead=1)),  # 0.77-0.87
        (2**31, LayerNormForwardCooperative(4, num_warps=8, programs_per_sm=2, lag=3, ahead=1)),  # 0.74
    ),
    4: (
        (16, LayerNormForwardTile(32, 1, 16, num_warps=2)),
        (64, LayerNormForwardTile(8, 1, 64, num_warps=2)),  # 1.00
        (128, LayerNormForwardTile(4, 1, 128, num_warps=1)),
        (256, LayerNormForwardTile(2, 1, 256, num_warps=2)),  # 1.01
        (512, LayerNormForwardTile(1, 1, 512, num_warps=1)),  # 1.00
        (768, LayerNormForwardTile(1, 3, 256, num_warps=1)),  # 1.02
        (1024, LayerNormForwardTile(1, 1, 1024, num_warps=2)),  # 1.00
        (1536, LayerNormForwardTile(1, 3, 512, num_warps=2)),  # 1.00
        (2048, LayerNormForwardResident(2, num_warps=4, programs_per_sm=4, prefetch_distance_per_sm=2)),  # 1.00
        (2560, LayerNormForwardResident(3, num_warps=4, programs_per_sm=3, prefetch_distance_per_sm=2)),  # 1.00
        (3072, LayerNormForwardResident(3, num_warps=4, programs_per_sm=4, prefetch_distance_per_sm=2)),  # 1.00
        (3584, LayerNormForwardTile(1, 7, 512, num_warps=2)),  # 0.99
        (4096, LayerNormForwardResident(2, num_warps=8, programs_per_sm=4, prefetch_distance_per_sm=2)),  # 1.00
        (5120, LayerNormForwardResident(3, num_warps=8, programs_per_sm=3, prefetch_distance_per_sm=1)),  # 1.01
        (6144, LayerNormForwardResident(3, num_warps=8, programs_per_sm=2, prefetch_distance_per_sm=1)),  # 1.00
        (7168, LayerNormForwardResident(4, num_warps=8, programs_per_sm=3, prefetch_distance_per_sm=1)),  # 1.00
        (8192, LayerNormForwardResident(4, num_warps=8, programs_per_sm=3, prefetch_distance_per_sm=1)),  # 1.00
        (10240, LayerNormForwardResident(5, num_warps=8, programs_per_sm=2, prefetch_distance_per_sm=1)),  # 0.99
        (12288, LayerNormForwardResident(3, num_warps=16, programs_per_sm=2, prefetch_distance_per_sm=1)),  # 1.00
        (14336, LayerNormForwardResident(7, num_warps=8, programs_per_sm=2, prefetch_distance_per_sm=1)),  # 0.98
        (16384, LayerNormForwardResident(4, num_warps=16, programs_per_sm=2, prefetch_distance_per_sm=1)),  # 0.98
        (20480, LayerNormForwardResident(5, num_warps=16, programs_per_sm=1, prefetch_distance_per_sm=1)),  # 0.96
        (24576, LayerNormForwardResident(3, num_warps=32, programs_per_sm=1, prefetch_distance_per_sm=1)),  # 0.97
        (32768, LayerNormForwardResident(8, num_warps=16, programs_per_sm=1, prefetch_distance_per_sm=1)),  # 0.95
        (524288, LayerNormForwardCooperative(2, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),  # 0.85-0.92
        (2**31, LayerNormForwardCooperative(2, num_warps=8, programs_per_sm=2, lag=3, ahead=1)),  # 0.81
    ),
}
# Rows that are too long for the resident programs together, and a single row from SINGLE_ROW_COLS on.  The parts
# have the size of the ranges of the last entry above, so that a row has the same bits with both algorithms.
FORWARD_SPLIT = {
    2: LayerNormForwardSplit(4, num_warps=8, apply_chunks=2, apply_num_warps=4, rows=16),  # 0.54-0.60
    4: LayerNormForwardSplit(2, num_warps=8, apply_chunks=1, apply_num_warps=4, rows=16),  # 0.48-0.61
}

# These entries replace those of FORWARD for rows of (first, last) columns whose size is no multiple of 16 bytes:
# accesses are narrow and nothing is prefetched, so there are more warps.
FORWARD_UNALIGNED: dict[int, tuple[tuple[int, int, ForwardConfig], ...]] = {
    2: (
        (513, 1024, LayerNormForwardResident(4, num_warps=1, programs_per_sm=16)),  # 0.80 (1001)
        (
            32769,
            53248,
            LayerNormForwardResident(13, num_warps=16, programs_per_sm=1, prefetch_distance_per_sm=1),
        ),  # 0.50 (50257)
        (53249, 65536, LayerNormForwardResident(16, num_warps=16, programs_per_sm=1, prefetch_distance_per_sm=1)),
        # With five programs a multiprocessor, as for aligned rows, a thread spills 8 to 376 bytes: 0.37-0.38.
        (
            65537,
            524288,
            LayerNormForwardCooperative(4, num_warps=4, programs_per_sm=4, lag=2, ahead=1),
        ),  # 0.45-0.46
    ),
    4: ((513, 1024, LayerNormForwardResident(4, num_warps=1, programs_per_sm=12)),),  # 0.99 (1001)
}

# These entries replace those of FORWARD for rows of (first, last) columns with a residual.
FORWARD_WITH_RESIDUAL: dict[int, tuple[tuple[int, int, ForwardConfig], ...]] = {
    2: (),
    4: (
        (12289, 14336, LayerNormForwardResident(4, num_warps=16, programs_per_sm=1, prefetch_distance_per_sm=1)),
    ),  # 1.01, 7 x 8 warps 0.96
}

# These entries replace those of FORWARD for rows of (first, last) columns with a scale or a shift for each sample,
# which persistent programs and those of several rows load less often.  Their keys are the size of an element, and
# whether there is a residual.  Measured on an H100, x of 13 to 38 MB.
FORWARD_MODULATED: dict[tuple[int, bool], tuple[tuple[int, int, ForwardConfig], ...]] = {
    (2, False): (
        (513, 768, LayerNormForwardTile(4, 3, 256, num_warps=2)),
        (1025, 1280, LayerNormForwardTile(1, 5, 256, num_warps=1, stages=4, programs_per_sm=16)),  # 0.94-0.99
        (1281, 1536, LayerNormForwardTile(2, 3, 512, num_warps=2)),  # 0.96-0.98
        (1537, 2048, LayerNormForwardTile(1, 8, 256, num_warps=1, stages=5, programs_per_sm=8)),  # 0.98
        (2049, 2560, LayerNormForwardTile(1, 10, 256, num_warps=1, stages=5, programs_per_sm=8)),  # 0.97
    ),
    (2, True): (
        (513, 768, LayerNormForwardTile(4, 3, 256, num_warps=2)),
        (
            1025,
            1280,
            LayerNormForwardResident(5, num_warps=1, programs_per_sm=24, prefetch_distance_per_sm=2),
        ),  # 0.98
        (
            1281,
            1536,
            LayerNormForwardResident(3, num_warps=2, programs_per_sm=12, prefetch_distance_per_sm=1),
        ),  # 0.97
    ),
    (4, False): ((1025, 1280, LayerNormForwardTile(4, 5, 256, num_warps=4)),),  # 1.01
    (4, True): (),
}

BACKWARD: dict[int, tuple[tuple[int, BackwardConfig], ...]] = {
    2: (
        (16, LayerNormBackwardTile(32, 16, num_warps=2, stages=3, programs_per_sm=4, holds_weight=True)),
        (
            64,
            LayerNormBackwardTile(32, 64, num_warps=4, stages=4, programs_per_sm=2, holds_weight=True),
        ),  # 0.93 on an H100, in place of 0.64
        (
            96,
            LayerNormBackwardTile(16, 32, num_warps=2, stages=4, programs_per_sm=2, holds_weight=True, chunks=3),
        ),  # 0.95 on an H100, in place of 0.74
        (128, LayerNormBackwardTile(16, 128, num_warps=2, stages=4, programs_per_sm=4, holds_weight=True)),
        (256, LayerNormBackwardTile(2, 256, num_warps=1, stages=3, programs_per_sm=12, holds_weight=True)),  # 0.98
        (
            512,
            LayerNormBackwardTile(2, 512, num_warps=2, stages=4, programs_per_sm=4, holds_weight=True, ahead=6),
        ),  # 0.98
        (
            640,
            LayerNormBackwardTile(
                1, 128, num_warps=1, stages=4, programs_per_sm=4, holds_weight=True, chunks=5, ahead=6
            ),
        ),  # H100
        (
            768,
            LayerNormBackwardTile(
                1, 256, num_warps=1, stages=4, programs_per_sm=4, holds_weight=True, chunks=3, ahead=6
            ),
        ),  # H100
        (
            1024,
            LayerNormBackwardTile(
                1, 256, num_warps=2, stages=4, programs_per_sm=4, holds_weight=True, chunks=4, ahead=3
            ),
        ),  # H100
        (
            1280,
            LayerNormBackwardTile(
                1, 256, num_warps=2, stages=4, programs_per_sm=4, holds_weight=True, chunks=5, ahead=3
            ),
        ),  # 0.98
        (
            1536,
            LayerNormBackwardTile(1, 512, num_warps=2, stages=3, programs_per_sm=4, holds_weight=True, chunks=3),
        ),  # 0.97
        (
            2048,
            LayerNormBackwardTile(1, 2048, num_warps=4, stages=4, programs_per_sm=2, holds_weight=True, ahead=6),
        ),  # 0.99
        (
            2560,
            LayerNormBackwardTile(1, 512, num_warps=4, stages=4, programs_per_sm=2, holds_weight=True, chunks=5),
        ),  # 0.98
        (
            3072,
            LayerNormBackwardTile(1, 4096, num_warps=4, stages=3, programs_per_sm=2, holds_weight=True, ahead=3),
        ),  # 0.98
        (
            4096,
            LayerNormBackwardTile(1, 4096, num_warps=4, stages=4, programs_per_sm=1, holds_weight=True, ahead=6),
        ),  # 0.98
        (
            5120,
            LayerNormBackwardTile(1, 1024, num_warps=8, stages=3, programs_per_sm=2, holds_weight=True, chunks=5),
        ),  # 0.94
        (7168, LayerNormBackwardTile(1, 8192, num_warps=8, stages=4, programs_per_sm=1, holds_weight=True)),  # 0.94
        (
            8192,
            LayerNormBackwardTile(1, 8192, num_warps=16, stages=4, programs_per_sm=1, holds_weight=False, ahead=4),
        ),  # .97
        (
            12288,
            LayerNormBackwardTile(1, 4096, num_warps=16, stages=3, programs_per_sm=1, holds_weight=True, chunks=3),
        ),  # 0.93
        (65536, LayerNormBackwardCooperative(2048, num_warps=4, programs_per_sm=4, lag=2, ahead=1)),  # 0.79-0.86
        (524288, LayerNormBackwardCooperative(2048, num_warps=4, programs_per_sm=4, lag=3, ahead=1)),  # 0.78
        # Every program reads the sums of all programs of a row: half as many took 151 us in place of 217.
        (2**31, LayerNormBackwardCooperative(4096, num_warps=8, programs_per_sm=2, lag=2, ahead=1)),  # 0.67
    ),
    4: (
        (16, LayerNormBackwardTile(32, 16, num_warps=2, stages=3, programs_per_sm=4, holds_weight=True)),
        (64, LayerNormBackwardTile(16, 64, num_warps=2, stages=3, programs_per_sm=4, holds_weight=True)),
        (128, LayerNormBackwardTile(8, 128, num_warps=2, stages=3, programs_per_sm=4, holds_weight=True)),
        (256, LayerNormBackwardTile(2, 256, num_warps=2, stages=3, programs_per_sm=6, holds_weight=True)),  # 0.98
        (512, LayerNormBackwardTile(1, 512, num_warps=2, stages=3, programs_per_sm=6, holds_weight=True)),  # 0.99
        (
            768,
            LayerNormBackwardTile(1, 256, num_warps=2, stages=3, programs_per_sm=4, holds_weight=True, chunks=3),
        ),  # 1.02
        (
            1024,
            LayerNormBackwardTile(2, 1024, num_warps=4, stages=4, programs_per_sm=1, holds_weight=True, ahead=6),
        ),  # 0.99
        (
            1280,
            LayerNormBackwardTile(1, 256, num_warps=2, stages=3, programs_per_sm=3, holds_weight=True, chunks=5),
        ),  # 0.98
        (
            1536,
            LayerNormBackwardTile(1, 512, num_warps=2, stages=3, programs_per_sm=3, holds_weight=True, chunks=3),
        ),  # 0.96 with SiLU
        (
            2048,
            LayerNormBackwardTile(1, 2048, num_warps=4, stages=4, programs_per_sm=1, holds_weight=True, ahead=6),
        ),  # 1.00
        (
            2560,
            LayerNormBackwardTile(
                1, 512, num_warps=4, stages=4, programs_per_sm=1, holds_weight=True, chunks=5, ahead=4
            ),
        ),  # 0.99
        (
            3072,
            LayerNormBackwardTile(
                1, 1024, num_warps=4, stages=3, programs_per_sm=1, holds_weight=True, chunks=3, ahead=3
            ),
        ),  # 0.99
        (
            4096,
            LayerNormBackwardTile(1, 4096, num_warps=16, stages=3, programs_per_sm=1, holds_weight=True, ahead=3),
        ),  # 0.98
        (5120, LayerNormBackwardTile(1, 8192, num_warps=8, stages=3, programs_per_sm=1, holds_weight=True)),  # 0.96
        (
            6144,
            LayerNormBackwardTile(
                1, 2048, num_warps=16, stages=3, programs_per_sm=1, holds_weight=True, chunks=3, ahead=3
            ),
        ),  # 0.97
        (
            7168,
            LayerNormBackwardTile(
                1, 1024, num_warps=16, stages=3, programs_per_sm=1, holds_weight=True, chunks=7, ahead=3
            ),
        ),  # 0.97
        (
            8192,
            LayerNormBackwardTile(1, 8192, num_warps=16, stages=3, programs_per_sm=1, holds_weight=True),
        ),  # 0.94
        (2**31, LayerNormBackwardCooperative(2048, num_warps=4, programs_per_sm=3, lag=2, ahead=1)),  # 0.92-0.94
    ),
}

BACKWARD_UNALIGNED: dict[int, tuple[tuple[int, int, BackwardConfig], ...]] = {
    2: (
        (
            513,
            1024,
            LayerNormBackwardTile(2, 1024, num_warps=4, stages=3, programs_per_sm=4, holds_weight=True),
        ),  # 0.64-0.73
        (
            12289,
            49152,
            LayerNormBackwardCooperative(1024, num_warps=2, programs_per_sm=6, lag=2, ahead=1),
        ),  # LayerNorm 0.48-0.49; with eight programs a multiprocessor it spills: 0.34-0.35
        (
            49153,
            65536,
            LayerNormBackwardCooperative(1024, num_warps=2, programs_per_sm=8, lag=2, ahead=1),
        ),  # 50257: LayerNorm 0.42-0.45, RMSNorm 0.55-0.56; with six 0.46-0.47 and 0.49-0.51
    ),
    4: (
        (
            513,
            1024,
            LayerNormBackwardTile(1, 1024, num_warps=4, stages=3, programs_per_sm=3, holds_weight=True),
        ),  # 0.87-0.89
    ),
}

# These entries replace those of BACKWARD for rows of (first, last) columns with an activation or dropout, which
# need more registers.  Measured with SiLU on an H200; "in place of" is the entry of BACKWARD.
_TILE_3072 = LayerNormBackwardTile(
    1, 1024, num_warps=4, stages=4, programs_per_sm=2, holds_weight=True, chunks=3, ahead=3
)
BACKWARD_WITH_EPILOGUE: dict[int, tuple[tuple[int, int, LayerNormBackwardTile], ...]] = {
    2: (
        (
            257,
            512,
            LayerNormBackwardTile(1, 512, num_warps=1, stages=3, programs_per_sm=12, holds_weight=True),
        ),  # 0.96, in place of 0.82
        (
            513,
            640,
            LayerNormBackwardTile(
                1, 128, num_warps=1, stages=3, programs_per_sm=8, holds_weight=True, chunks=5, ahead=3
            ),
        ),  # 0.92, in place of 0.72
        (
            641,
            768,
            LayerNormBackwardTile(
                1, 256, num_warps=1, stages=3, programs_per_sm=8, holds_weight=True, chunks=3, ahead=3
            ),
        ),  # 0.95, in place of 0.80
        (
            769,
            1024,
            LayerNormBackwardTile(1, 1024, num_warps=2, stages=3, programs_per_sm=6, holds_weight=True),
        ),  # 0.93, in place of 0.83
        (
            1025,
            1280,
            LayerNormBackwardTile(1, 256, num_warps=2, stages=3, programs_per_sm=6, holds_weight=True, chunks=5),
        ),  # 0.95, in place of 0.66
        (
            1281,
            1536,
            LayerNormBackwardTile(
                1, 512, num_warps=2, stages=3, programs_per_sm=4, holds_weight=True, chunks=3, ahead=3
            ),
        ),  # 0.94, in place of 0.63
        (
            1537,
            2048,
            LayerNormBackwardTile(1, 1024, num_warps=4, stages=4, programs_per_sm=3, holds_weight=True, chunks=2),
        ),  # 0.95, in place of 0.78
        (
            2049,
            2560,
            LayerNormBackwardTile(1, 512, num_warps=4, stages=3, programs_per_sm=3, holds_weight=True, chunks=5),
        ),  # 0.93, in place of 0.89
        (2561, 3072, _TILE_3072),  # 0.89, in place of 0.57
        (
            3073,
            4096,
            LayerNormBackwardTile(1, 1024, num_warps=8, stages=3, programs_per_sm=2, holds_weight=True, chunks=4),
        ),  # 0.89, in place of 0.45
        (
            7169,
            8192,
            LayerNormBackwardTile(1, 8192, num_warps=16, stages=3, programs_per_sm=1, holds_weight=True),
        ),  # 0.81, in place of 0.68
        (
            8193,
            12288,
            LayerNormBackwardTile(1, 4096, num_warps=16, stages=3, programs_per_sm=1, holds_weight=False, chunks=3),
        ),  # 0.77, in place of 0.66
    ),
    4: (),
}

# The same for rows with a gate, and thus a residual; 16-bit rows beyond 5120 columns, and float32 ones, were
# measured on an H100.
BACKWARD_WITH_GATE: dict[int, tuple[tuple[int, int, LayerNormBackwardTile], ...]] = {
    2: (
        (2561, 3072, _TILE_3072),  # 0.97, in place of 0.46
        (
            3073,
            4096,
            LayerNormBackwardTile(1, 4096, num_warps=8, stages=3, programs_per_sm=1, holds_weight=True, ahead=3),
        ),  # 0.98, in place of 0.49
        (
            4097,
            5120,
            LayerNormBackwardTile(
                1, 1024, num_warps=8, stages=3, programs_per_sm=1, holds_weight=True, chunks=5, ahead=3
            ),
        ),  # 0.86, in place of 0.46
        (
            5121,
            7168,
            LayerNormBackwardTile(1, 2048, num_warps=8, stages=3, programs_per_sm=1, holds_weight=False, chunks=4),
        ),  # 0.92, in place of 0.79
        (
            7169,
            8192,
            LayerNormBackwardTile(1, 8192, num_warps=16, stages=3, programs_per_sm=1, holds_weight=False),
        ),  # 0.92, in place of 0.64
    ),
    4: (
        (
            4097,
            5120,
            LayerNormBackwardTile(1, 1024, num_warps=8, stages=3, programs_per_sm=1, holds_weight=True, chunks=5),
        ),  # 0.94, in place of 0.73
    ),
}

# For rows that programs may not share and one program holds: of RMSNorm, and of LayerNorm without residual,
# activation and dropout, with which it spills too many registers.
BACKWARD_UNSHARED: dict[int, tuple[tuple[int, LayerNormBackwardTile], ...]] = {
    2: (
        (
            16384,
            LayerNormBackwardTile(1, 8192, num_warps=16, stages=3, programs_per_sm=1, holds_weight=False, chunks=2),
        ),  # of the split algorithm: RMSNorm 0.70, LayerNorm 0.88 (JAX, H200)
    ),
    4: (),
}

# For devices where programs cannot wait for one another, and rows that are too long for all programs together.
BACKWARD_SPLIT = {
    2: LayerNormBackwardSplit(4096, 8, rows=1, block_n=2048, num_warps=4, stages=4, programs_per_sm=2),  # 0.56-0.58
    4: LayerNormBackwardSplit(4096, 8, rows=1, block_n=1024, num_warps=4, stages=4, programs_per_sm=2),  # 0.55-0.59
}

# For float8 and for chains: tiles stay in registers for all passes, as float32 for every dtype of x.  A thread has
# 16 to 56 values; a kernel needs about twice as many registers in total, so that a multiprocessor loads 64 KB or
# more of 16-bit rows at a time.  An entry is used for every row up to its number of columns.
TILES = (
    (16, LayerNormForwardTile(32, 1, 16, num_warps=2)),
    (64, LayerNormForwardTile(32, 1, 64, num_warps=4)),
    (128, LayerNormForwardTile(8, 1, 128, num_warps=1)),
    (256, LayerNormForwardTile(4, 1, 256, num_warps=1)),
    (512, LayerNormForwardTile(4, 1, 512, num_warps=2)),
    (768, LayerNormForwardTile(1, 3, 256, num_warps=1)),
    (1024, LayerNormForwardTile(1, 1, 1024, num_warps=1)),
    (1536, LayerNormForwardTile(1, 3, 512, num_warps=2)),
    (2048, LayerNormForwardTile(1, 1, 2048, num_warps=2)),
    (2560, LayerNormForwardTile(1, 5, 512, num_warps=2)),
    (3072, LayerNormForwardTile(1, 3, 1024, num_warps=4)),
    (4096, LayerNormForwardTile(1, 1, 4096, num_warps=4)),
    (5120, LayerNormForwardTile(1, 5, 1024, num_warps=4)),
    (6144, LayerNormForwardTile(1, 3, 2048, num_warps=8)),
    (7168, LayerNormForwardTile(1, 7, 1024, num_warps=4)),
    (8192, LayerNormForwardTile(1, 1, 8192, num_warps=8)),
    (10240, LayerNormForwardTile(1, 5, 2048, num_warps=8)),
    (12288, LayerNormForwardTile(1, 3, 4096, num_warps=16)),
    (14336, LayerNormForwardTile(1, 7, 2048, num_warps=8)),
    (16384, LayerNormForwardTile(1, 1, 16384, num_warps=16)),
)

# Float8 rows that do not stay in registers.  A multiprocessor has two programs, one of which reads while the other
# reduces, as long as the rows of all programs fit well into L2; longer rows have one program.
FLOAT8_SWEEP: dict[int, tuple[tuple[int, LayerNormForwardSweep], ...]] = {
    2: (
        (65536, LayerNormForwardSweep(8192, num_warps=16, prefetch_distance_per_sm=1)),
        (2**31, LayerNormForwardSweep(16384, num_warps=32)),
    ),
    4: (
        (32768, LayerNormForwardSweep(4096, num_warps=16, prefetch_distance_per_sm=1)),
        (2**31, LayerNormForwardSweep(8192, num_warps=32)),
    ),
}

# Rows of chains that do not stay in registers: each thread has one access per chunk, which leaves registers for the
# parameters of several norms.
CHAIN_SWEEP = {
    2: LayerNormForwardSweep(4096, num_warps=16, prefetch_distance_per_sm=1),
    4: LayerNormForwardSweep(2048, num_warps=16, prefetch_distance_per_sm=1),
}
