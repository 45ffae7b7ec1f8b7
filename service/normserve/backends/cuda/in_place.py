"""Small batches in pinned memory: one launch reads the inputs and writes the results directly, without copies.

A copy to or from the device takes several microseconds before its first byte is transferred, and the kernel as
many to start after it.  A kernel that reads host memory waits for the bus only once.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from fusednorm.results import Backward, Forward
from torch import Tensor

from normserve.backends.cuda.parcels import is_packed, pack, places_of, views
from normserve.backends.cuda.pinned import PinnedMemory
from normserve.backends.launch import call_of, destinations, parameters_of
from normserve.backends.tensors import (
    TORCH_DTYPES,
    channels_first,
    kernel_bytes_of,
    results_to_write,
    shape_of,
    split,
)
from normserve.jobs.job import Batch, NormSpec
from normserve.jobs.results import Described
from normserve.memory.host_tensors import HostTensor
from normserve.memory.slabs import SlabPool, memory_of

MOST_BYTES = 1024 * 1024
"""Of all tensors that come and go, each way over the bus at once; more is as quick under copies."""

# Layouts that are kept, and those of them that a slab keeps calls of: many, and the few that come all the time.
_MOST_LAYOUTS, _MOST_CALLS = 4096, 64

Call = Callable[..., Forward | Backward]


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where in a slab a launch's tensors lie, and for a job of so many rows, the fewest bytes of its share."""

    spec: NormSpec
    came: Described
    goes: Described
    offsets: Mapping[str, int]
    nbytes: int
    kernel_bytes: dict[int, int] = field(default_factory=dict)

    def call_in(self, memory: PinnedMemory, library: ModuleType) -> Call:
        """The launch on a slab's memory, but for a registered layer's parameters."""

        def seen(tensors: Described) -> dict[str, Tensor]:
            return {
                name: memory.piece(self.offsets[name], TORCH_DTYPES[dtype], shape)
                for name, (dtype, shape) in tensors.items()
            }

        came = {name: channels_first(self.spec, name, tensor) for name, tensor in seen(self.came).items()}
        return call_of(library, self.spec, came, {"out": destinations(self.spec, seen(self.goes))})


@dataclass(frozen=True, slots=True)
class Workplace:
    """A packed batch and memory for its results, in one slab.

    Attributes:
        call: launches it on the packed tensors; takes a registered layer's parameters by name.
    """

    call: Call
    _batch: Batch
    _slab: memoryview
    _layout: _Layout

    def compute(self) -> None:
        """Launch it, with its layer's parameters."""
        layer = self._batch.jobs[0].layer
        self.call(**({} if layer is None else parameters_of(layer.resident)))

    def shares(self) -> tuple[dict[str, HostTensor], ...]:
        """Each job's results, as the host sees them; they keep the slab from going home."""
        return split(self._batch, views(self._slab, self._layout.offsets, self._layout.goes))

    def kernel_bytes(self, shares: Sequence[Mapping[str, HostTensor]]) -> tuple[int, ...]:
        """For each job, the fewest bytes that its share of the launch must move."""
        return kernel_bytes_of(self._batch, shares, self._layout.kernel_bytes)


class Workplaces:
    """Where small batches are computed.  One thread at a time."""

    def __init__(self, slabs: SlabPool, library: ModuleType) -> None:
        self._slabs = slabs
        self._library = library
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
        call: Call | None = memory.calls.get(layout)
        if call is None:
            if len(memory.calls) >= _MOST_CALLS:
                memory.calls.clear()
            call = memory.calls[layout] = layout.call_in(memory, self._library)
        return Workplace(call, batch, slab, layout)

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
        goes = results_to_write(job, rows)
        layout = None
        if goes is not None:
            offsets, end = places_of(came | goes)
            layout = _Layout(job.spec, came, goes, offsets, end) if end <= MOST_BYTES else None
        self._layouts[key] = layout
        return layout
