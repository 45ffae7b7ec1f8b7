"""Lists of cells by name.

The suites of LayerNorm and RMSNorm: `plain`, `residual`, `activation` and `dropout` sweep the row length with x of
256 MiB, `odd` does the same over lengths that suit neither vectors nor blocks, `features` over a few lengths of
every other variant; `few_rows`, `small`, `tutorial` and `published` have given numbers of rows.  `layer_norm` is
all of these.

Those of GroupNorm, each in both layouts: `group_images` has what diffusion models, autoencoders and classifiers
normalise, with SiLU in 16 bits; `group_float32` the same in float32, `group_variants` a few of them with everything
else that is fused, `group_odd` groups that suit neither vectors nor blocks.  `group_norm` is all of these.

Norms of diffusion, image and volume models in bfloat16: `adaptive` has LayerNorm and RMSNorm with scale and shift
of each sample, without and with a gate; `channels` LayerNorm over channels, and `instance` InstanceNorm, which is
GroupNorm with a group for each channel, both in both layouts.

`first` is a short look at everything.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby, product

from benchmarks.workload.benchmark_cells import KernelCell, compute_sweep_rows

DTYPES = ("bfloat16", "float16", "float32")
ROW_OPS = ("layer_norm", "rms_norm")
PASSES = ("forward", "backward")

ROW_LENGTHS = (256, 512, 768, 1024, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 12288, 14336, 16384)
LONG_ROW_LENGTHS = (32768, 65536, 131072, 262144)
ODD_ROW_LENGTHS = (1001, 50257, 128256)
SWEEP_LENGTHS = ROW_LENGTHS + LONG_ROW_LENGTHS + ODD_ROW_LENGTHS
FEW_ROW_LENGTHS = (1024, 4096, 8192, 16384)
HEADS = ((32, 64), (32, 128), (32, 256))
FEW_ROWS = (*product((1, 16, 64), (1 << 20, 1 << 22)), (1, 1 << 25))
SMALL_SHAPES = ((1, 4096), (64, 1024), (128, 4096), (512, 2048), (16, 8192))
PUBLISHED_SHAPES = (
    (131072, 256),
    (32768, 1024),
    (32768, 4096),
    (16384, 8192),
    (8192, 16384),
    (4096, 32768),
    (2048, 65536),
    (1024, 131072),
    (256, 262144),
)
"""Shapes that QuACK publishes, and others use: equal rows in every dtype, so x is twice as large in float32."""

TUTORIAL_SHAPES = tuple((4096, cols) for cols in range(1024, 15873, 512))
GROUP_SHAPES = (
    (2, 320, 64, 64),
    (2, 640, 32, 32),
    (2, 1280, 16, 16),
    (16, 320, 64, 64),
    (8, 512, 64, 64),
    (32, 256, 56, 56),
    (1, 512, 128, 128),
    (2, 960, 128, 128),
    (4, 256, 256, 256),
    (4, 128, 512, 512),
    (1, 128, 1024, 1024),
    (1, 128, 20, 256, 256),
)
"""Small groups, then groups that fit a program and fill the device, then larger ones; a video last."""

ODD_GROUPS = (
    ((16, 128, 64, 64), 128),
    ((4, 64, 256, 256), 64),
    ((8, 256, 64, 64), 1),
    ((1, 128, 1024, 1024), 1),
    ((8, 96, 64, 64), 32),
    ((8, 320, 59, 61), 32),
    ((2, 960, 61, 67), 32),
    ((16, 512, 4096), 32),
    ((2, 256, 16, 64, 64), 32),
)
"""InstanceNorm, one group, groups of 3 channels, of 10 and 30 with prime sizes, audio, and a volume."""

SAMPLE_SHAPES = (
    (16, 1024, 1152),
    (2, 4096, 3072),
    (8, 256, 1152),
    (4, 1024, 1536),
    (32, 256, 1152),
    (1, 4608, 3072),
)
"""Samples of tokens in DiT, FLUX and SD3; no launches are tuned for the last three."""

LONG_ROWS_SHAPE = (8, 1024, 12288)
"""Rows that a backward pass with a gate divides into parts, and one without a gate does not."""

CHANNEL_SHAPES = (
    (32, 128, 56, 56),
    (32, 512, 14, 14),
    (8, 96, 256, 256),
    (32, 1024, 7, 7),
    (32, 256, 28, 28),
    (16, 192, 48, 48),
    (4, 768, 32, 32),
    (2, 64, 512, 512),
)
"""Images in ConvNeXt and segmentation models; no launches are tuned for the last four."""

INSTANCE_SHAPES = (
    (2, 32, 96, 96, 96),
    (2, 64, 48, 48, 48),
    (2, 128, 24, 24, 24),
    (4, 64, 128, 128),
    (16, 64, 56, 56),
    (8, 128, 28, 28),
)
"""Volumes in nnU-Net, and images in style models."""


def iterate_sweep(
    lengths: Iterable[int],
    dtypes: Iterable[str] = DTYPES,
    ops: Iterable[str] = ROW_OPS,
    passes: Iterable[str] = PASSES,
    variants: Iterable[str] = ("plain",),
) -> Iterator[KernelCell]:
    """Rows of every length, x of 256 MiB."""
    for dtype, cols, op, variant, pass_ in product(dtypes, lengths, ops, variants, passes):
        yield KernelCell(op, pass_, variant, (compute_sweep_rows(cols, dtype), cols), 0, dtype, "rows")


def iterate_shapes(
    of: Iterable[tuple[int, int]],
    dtypes: Iterable[str],
    ops: Iterable[str] = ROW_OPS,
    passes: Iterable[str] = PASSES,
) -> Iterator[KernelCell]:
    """Cells of the given (rows, cols)."""
    for dtype, shape, op, pass_ in product(dtypes, of, ops, passes):
        yield KernelCell(op, pass_, "plain", shape, 0, dtype, "rows")


def iterate_heads(of: Iterable[tuple[int, int]], dtypes: Iterable[str]) -> Iterator[KernelCell]:
    """Tokens of (heads, cols) with parameters for each head, x of 256 MiB."""
    for dtype, (count, cols), op, pass_ in product(dtypes, of, ROW_OPS, PASSES):
        shape = (compute_sweep_rows(count * cols, dtype), count, cols)
        yield KernelCell(op, pass_, "per_head", shape, 0, dtype, "heads")


def iterate_groups(
    of: Iterable[tuple[tuple[int, ...], int]], dtypes: Iterable[str], variants: Iterable[str] = ("silu",)
) -> Iterator[KernelCell]:
    """Shapes and numbers of groups, both passes, both layouts."""
    for dtype, (shape, count), layout, variant, pass_ in product(dtypes, of, ("nchw", "nhwc"), variants, PASSES):
        yield KernelCell("group_norm", pass_, variant, shape, count, dtype, layout)


def _iterate_adaptive() -> Iterator[KernelCell]:
    of_each = [("layer_norm", variant, shape) for variant in ("adaptive", "gated") for shape in SAMPLE_SHAPES]
    of_each.append(("layer_norm", "gated", LONG_ROWS_SHAPE))
    for (op, variant, shape), pass_ in product([*of_each, ("rms_norm", "adaptive", SAMPLE_SHAPES[0])], PASSES):
        yield KernelCell(op, pass_, variant, shape, 0, "bfloat16", "samples")


def _iterate_channels() -> Iterator[KernelCell]:
    for shape, layout, pass_ in product(CHANNEL_SHAPES, ("nchw", "nhwc"), PASSES):
        yield KernelCell("layer_norm", pass_, "plain", shape, 0, "bfloat16", layout)


def _pair_with_32_groups(shapes: Iterable[tuple[int, ...]]) -> list[tuple[tuple[int, ...], int]]:
    return [(shape, 32) for shape in shapes]


def _iterate_dropout() -> Iterator[KernelCell]:
    dtypes = ("bfloat16", "float32")
    yield from iterate_sweep(FEW_ROW_LENGTHS, dtypes, variants=("dropout",))
    yield from iterate_sweep(FEW_ROW_LENGTHS, dtypes, passes=("forward",), variants=("residual_dropout",))


def _iterate_features() -> Iterator[KernelCell]:
    yield from iterate_sweep(FEW_ROW_LENGTHS, ("bfloat16",), variants=("residual_float32",))
    yield from iterate_sweep(FEW_ROW_LENGTHS, ("bfloat16",), passes=("forward",), variants=("float8",))
    chains = ("bfloat16", "float32")
    yield from iterate_sweep(FEW_ROW_LENGTHS, chains, ops=("layer_norm",), passes=("forward",), variants=("chain",))
    yield from iterate_heads(HEADS, ("bfloat16",))


def _iterate_tutorial() -> Iterator[KernelCell]:
    """The series of Triton's LayerNorm tutorial, and another shape that others publish."""
    yield from iterate_shapes(TUTORIAL_SHAPES, ("float16",), ops=("layer_norm",))
    yield from iterate_shapes([(2048, 8192)], ("float32",), ops=("layer_norm",))


def _iterate_first() -> Iterator[KernelCell]:
    yield from iterate_sweep((1024, 4096, 8192, 16384, 32768, 131072), ("bfloat16", "float32"), ("layer_norm",))
    yield from iterate_groups(
        _pair_with_32_groups(GROUP_SHAPES[:1] + GROUP_SHAPES[3:6] + GROUP_SHAPES[8:10]), ("bfloat16",)
    )


def _iterate_group_variants() -> Iterator[KernelCell]:
    few = GROUP_SHAPES[:1] + GROUP_SHAPES[3:6] + GROUP_SHAPES[7:9]
    yield from iterate_groups(_pair_with_32_groups(few), ("bfloat16",), ("plain", "residual", "scale_shift_silu"))


def _iterate_group_odd() -> Iterator[KernelCell]:
    yield from iterate_groups(ODD_GROUPS, ("bfloat16",))
    yield from iterate_groups(ODD_GROUPS[:3], ("bfloat16",), ("no_affine",))


_ROW_SUITES: dict[str, Callable[[], Iterable[KernelCell]]] = {
    "plain": lambda: iterate_sweep(ROW_LENGTHS + LONG_ROW_LENGTHS),
    "residual": lambda: iterate_sweep(ROW_LENGTHS + LONG_ROW_LENGTHS, passes=("forward",), variants=("residual",)),
    "activation": lambda: iterate_sweep(
        ROW_LENGTHS, ops=("layer_norm",), passes=("forward",), variants=("relu", "silu", "gelu_tanh")
    ),
    "dropout": _iterate_dropout,
    "odd": lambda: iterate_sweep(ODD_ROW_LENGTHS),
    "features": _iterate_features,
    "few_rows": lambda: iterate_shapes(FEW_ROWS, DTYPES, passes=("forward",)),
    "small": lambda: iterate_shapes(SMALL_SHAPES, ("bfloat16",), passes=("forward",)),
    "tutorial": _iterate_tutorial,
    "published": lambda: iterate_shapes(PUBLISHED_SHAPES, ("bfloat16", "float32"), ops=("layer_norm",)),
}

_GROUP_SUITES: dict[str, Callable[[], Iterable[KernelCell]]] = {
    "group_images": lambda: iterate_groups(_pair_with_32_groups(GROUP_SHAPES), ("bfloat16", "float16")),
    "group_float32": lambda: iterate_groups(_pair_with_32_groups(GROUP_SHAPES), ("float32",)),
    "group_variants": _iterate_group_variants,
    "group_odd": _iterate_group_odd,
}

SUITES: dict[str, Callable[[], Iterable[KernelCell]]] = {
    "first": _iterate_first,
    **_ROW_SUITES,
    "layer_norm": lambda: chain.from_iterable(suite() for suite in _ROW_SUITES.values()),
    **_GROUP_SUITES,
    "group_norm": lambda: chain.from_iterable(suite() for suite in _GROUP_SUITES.values()),
    "adaptive": _iterate_adaptive,
    "channels": _iterate_channels,
    "instance": lambda: iterate_groups(
        ((shape, shape[1]) for shape in INSTANCE_SHAPES), ("bfloat16",), ("plain", "leaky_relu")
    ),
}


def list_cells(suites: Iterable[str]) -> list[KernelCell]:
    """The cells of several suites, each once; those with the same tensors are neighbours."""
    cells = list(dict.fromkeys(cell for suite in suites for cell in SUITES[suite]()))
    order: dict[object, int] = {}
    for cell in cells:
        order.setdefault(_get_tensor_key(cell), len(order))
    return sorted(cells, key=lambda cell: order[_get_tensor_key(cell)])


def select_shard(cells: Iterable[KernelCell], index: int, count: int) -> list[KernelCell]:
    """Shard `index`, from 1, of `count` about equal ones; neighbours with the same tensors stay together."""
    shards: list[list[KernelCell]] = [[] for _ in range(count)]
    for _, neighbours in groupby(cells, _get_tensor_key):
        min(shards, key=len).extend(neighbours)
    return shards[index - 1]


def _get_tensor_key(cell: KernelCell) -> object:
    return cell.shape, cell.dtype, cell.layout
