"""What is timed: one cell is one pass of one operation over one shape, dtype and layout."""

from collections.abc import Iterator
from dataclasses import dataclass

X_BYTES = 256 << 20
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the benchmark for each provider.

    Attributes:
        op: layer_norm, rms_norm or group_norm.
        pass_: forward or backward (backward with statistics saved, and the gradients of the parameters).
        variant: plain, residual, or an activation.
        shape: (rows, cols), or (n, c, *spatial) whatever the layout.
        groups: num_groups of group_norm, 0 elsewhere.
        dtype: of x, y and the parameters.
        layout: rows, nchw or nhwc.
    """

    op: str
    pass_: str
    variant: str
    shape: tuple[int, ...]
    groups: int
    dtype: str
    layout: str

    @property
    def activation(self) -> str:
        return "none" if self.variant in ("plain", "residual") else self.variant

    @property
    def shape_name(self) -> str:
        """4096x8192, or 8x512x64x64g32."""
        return "x".join(map(str, self.shape)) + (f"g{self.groups}" if self.groups else "")


ROW_LENGTHS = (256, 512, 768, 1024, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 12288, 14336, 16384)
LONG_ROW_LENGTHS = (32768, 65536, 131072, 262144)
ODD_ROW_LENGTHS = (1001, 50257, 128256)
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


def _rows(cols: int, dtype: str) -> int:
    return max(1, X_BYTES // (4 if dtype == "float32" else 2) // cols)


def row_cells(lengths: tuple[int, ...], dtypes: tuple[str, ...], ops: tuple[str, ...]) -> Iterator[Cell]:
    """Both passes over x of 256 MiB."""
    for op in ops:
        for dtype in dtypes:
            for cols in lengths:
                for pass_ in ("forward", "backward"):
                    yield Cell(op, pass_, "plain", (_rows(cols, dtype), cols), 0, dtype, "rows")


def variant_cells(lengths: tuple[int, ...], dtypes: tuple[str, ...]) -> Iterator[Cell]:
    """Forward with a residual or an activation."""
    for dtype in dtypes:
        for cols in lengths:
            for variant in ("residual", "relu", "silu", "gelu_tanh"):
                yield Cell("layer_norm", "forward", variant, (_rows(cols, dtype), cols), 0, dtype, "rows")


def tutorial_cells() -> Iterator[Cell]:
    """The series of Triton's LayerNorm tutorial, and one more shape that others publish."""
    for cols in range(1024, 15873, 512):
        yield Cell("layer_norm", "forward", "plain", (4096, cols), 0, "float16", "rows")
    yield Cell("layer_norm", "forward", "plain", (2048, 8192), 0, "float32", "rows")


def group_cells(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], variants: tuple[str, ...]
) -> Iterator[Cell]:
    """Both passes, both layouts, 32 groups."""
    for dtype in dtypes:
        for shape in shapes:
            for layout in ("nchw", "nhwc"):
                for variant in variants:
                    for pass_ in ("forward", "backward"):
                        yield Cell("group_norm", pass_, variant, shape, 32, dtype, layout)


SUITES = {
    "first": lambda: [
        *row_cells((1024, 4096, 8192, 16384, 32768, 131072), ("bfloat16", "float32"), ("layer_norm",)),
        *group_cells(GROUP_SHAPES[:1] + GROUP_SHAPES[3:6] + GROUP_SHAPES[8:10], ("bfloat16",), ("silu",)),
    ],
    "layer_norm": lambda: [
        *row_cells(ROW_LENGTHS + LONG_ROW_LENGTHS + ODD_ROW_LENGTHS, DTYPES, ("layer_norm",)),
        *row_cells(ROW_LENGTHS, ("bfloat16",), ("rms_norm",)),
        *variant_cells((1024, 4096, 8192, 16384), ("bfloat16", "float32")),
    ],
    "tutorial": lambda: list(tutorial_cells()),
    "group_norm": lambda: list(group_cells(GROUP_SHAPES, ("bfloat16",), ("plain", "silu"))),
}
"""Lists of cells by name; `first` is short."""
