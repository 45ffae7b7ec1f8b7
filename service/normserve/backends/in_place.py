"""Small batches in pinned memory: one launch reads what came and writes what goes where it lies; nothing is copied.

A copy to the device or back takes several microseconds before its first byte moves, and the kernel as many to begin
after it.  A kernel that reads host memory waits for the bus itself, once.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from fusednorm.results import Backward, Forward
from torch import Tensor

from normserve.backends.parcels import Described, is_packed, pack, places_of, views
from normserve.backends.pinned import PinnedMemory
from normserve.backends.tensors import TORCH_DTYPES, channels_first, results_of, shape_of
from normserve.jobs import Batch, NormSpec, Pass
from normserve.slabs import SlabPool, memory_of
from normserve.tensors import HostTensor

MOST_BYTES = 1024 * 1024
"""Of all tensors that come and go, each way over the bus at once; more is as quick under copies."""

# Layouts that are kept, and those of them whose tensors a slab keeps: many, and the few that come all the time.
_MOST_LAYOUTS, _MOST_SEEN = 4096, 64


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where in a slab a launch's tensors lie."""

    spec: NormSpec
    came: Described
    goes: Described
    offsets: Mapping[str, int]
    nbytes: int

    def seen_in(self, memory: PinnedMemory) -> tuple[dict[str, Tensor], Forward | Backward]:
        """The device's tensors in a slab's memory."""

        def seen(tensors: Described) -> dict[str, Tensor]:
            return {
                name: channels_first(self.spec, name, memory.piece(self.offsets[name], TORCH_DTYPES[dtype], shape))
                for name, (dtype, shape) in tensors.items()
            }

        results = Forward if self.spec.direction is Pass.FORWARD else Backward
        return seen(self.came), results(**seen(self.goes))


@dataclass(frozen=True, slots=True)
class Workplace:
    """A batch's tensors in one slab.

    Attributes:
        inputs: what came, packed, as the device sees it; GroupNorm's as [B, C, *spatial].
        out: where results go, likewise.
    """

    inputs: dict[str, Tensor]
    out: Forward | Backward
    _slab: memoryview
    _layout: _Layout

    def results(self) -> dict[str, HostTensor]:
        """The memory of `out` as the host sees it, in payload order; it keeps the slab from going home."""
        return views(self._slab, self._layout.offsets, self._layout.goes)


class Workplaces:
    """Where small batches are computed.  One thread at a time."""

    def __init__(self, slabs: SlabPool) -> None:
        self._slabs = slabs
        self._layouts: dict[Hashable, _Layout | None] = {}

    def prepare(self, batch: Batch) -> Workplace | None:
        """Pack a batch to be computed in place; None if it is better copied: large, empty, or to be converted."""
        if batch.nbytes > MOST_BYTES or not is_packed(batch):
            return None
        layout = self._layout_of(batch)
        if layout is None:
            return None
        slab = self._slabs.take(layout.nbytes)
        memory = memory_of(slab)
        if not isinstance(memory, PinnedMemory):
            # Older than the device's start.
            return None
        pack(batch, slab, layout.offsets)
        if layout not in memory.seen:
            if len(memory.seen) >= _MOST_SEEN:
                memory.seen.clear()
            memory.seen[layout] = layout.seen_in(memory)
        inputs, out = memory.seen[layout]
        return Workplace(inputs, out, slab, layout)

    def _layout_of(self, batch: Batch) -> _Layout | None:
        job = batch.jobs[0]
        rows = sum([each.rows for each in batch.jobs])
        came = {name: (tensor.dtype, shape_of(job, name, rows)) for name, tensor in job.tensors.items()}
        layer = job.layer
        of_layer = None if layer is None else (layer.size, layer.dtype, layer.has_bias)
        key = (job.spec, rows, of_layer, *came.items())
        if key in self._layouts:
            return self._layouts[key]
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        goes = results_of(job, rows)
        offsets, end = places_of(came | goes)
        residual = job.tensors.get("residual")
        # The library's sum has the residual's dtype, the API's has x's.
        converted = residual is not None and residual.dtype is not job.x.dtype
        fits = rows and not converted and end <= MOST_BYTES
        layout = self._layouts[key] = _Layout(job.spec, came, goes, offsets, end) if fits else None
        return layout
