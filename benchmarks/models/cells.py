"""The timed passes of each model, the most important first: eager and graphs, then compiled ones."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness.records import MODEL

PASSES = ("step", "forward")


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One row of the CSV for each provider; see `benchmarks.harness.records.CellColumns`.

    Attributes:
        op: model.
        pass_: step (forward, loss and backward) or forward (without gradients and labels).
        variant: eager, graph (one CUDA graph of the whole pass) or compile.
        shape_name: of the batch.
        layout: the architecture, a name in `ARCHITECTURES`.
    """

    op: str
    pass_: str
    variant: str
    shape_name: str
    dtype: str
    layout: str


@dataclass(frozen=True, slots=True)
class ModelCell:
    """One model with one batch shape, in some passes and variants."""

    architecture: str
    shape: tuple[int, ...]
    variants: tuple[str, ...] = ("eager", "graph")
    passes: tuple[str, ...] = PASSES

    @property
    def dtype(self) -> str:
        return "bfloat16"

    @property
    def layout(self) -> str:
        return self.architecture

    @property
    def shape_name(self) -> str:
        """1x512."""
        return "x".join(map(str, self.shape))

    @property
    def name(self) -> str:
        """model gpt2 1x512 eager graph, step forward."""
        return f"model {self.architecture} {self.shape_name} {' '.join(self.variants)}, {' '.join(self.passes)}"

    def make_row(self, pass_: str, variant: str) -> ModelRow:
        """The name of a row of this cell."""
        return ModelRow(MODEL, pass_, variant, self.shape_name, self.dtype, self.layout)


_TARGETS = (
    ("gpt2", (1, 512)),
    ("bert", (1, 128)),
    ("vit", (8, 3, 224, 224)),
    ("blocks", (2, 320, 64, 64)),
    ("blocks", (16, 320, 64, 64)),
    ("gpt2", (16, 512)),
    ("llama", (4, 2048)),
    ("vit", (128, 3, 224, 224)),
    ("vae_decoder", (1, 3, 1024, 1024)),
    ("convnext", (32, 3, 224, 224)),
    ("dit", (32, 256, 1152)),
    ("unet3d", (2, 1, 128, 128, 128)),
)
_BETWEEN = (
    *(("gpt2", (n, 512)) for n in (2, 4, 8)),
    *(("vit", (n, 3, 224, 224)) for n in (16, 32, 64)),
)
"""Batches between those above, for the curve of step time over the batch."""

_WITH_GROUP_NORM = ("blocks", "vae_decoder", "unet3d")
"""Architectures that a patch also changes if they are compiled: LayerNorm and RMSNorm are left to the compiler."""


def _iterate_cells() -> Iterator[ModelCell]:
    for target in _TARGETS:
        yield ModelCell(*target)
    for architecture, shape in _BETWEEN:
        yield ModelCell(architecture, shape, ("eager",), ("step",))
    for architecture, shape in _TARGETS:
        if architecture in _WITH_GROUP_NORM:
            yield ModelCell(architecture, shape, ("compile",), ("step",))


CELLS = tuple(_iterate_cells())
"""In the order in which they are timed."""
