"""Small batches in pinned memory: one launch reads the inputs and writes the results directly, without copies.

A copy to or from the device takes several microseconds before its first byte is transferred, and the kernel as
many to start after it.  A kernel that reads host memory waits for the bus only once.
"""

from collections.abc import Callable
from types import ModuleType

from fusednorm.results import Backward, Forward

from normserve.backends.cuda.pinned import PinnedMemory
from normserve.backends.cuda.places import BatchPlaces, LaunchLayout, pieces_of
from normserve.backends.launch import call_of, destinations
from normserve.backends.tensors import channels_first
from normserve.memory.slabs import memory_of

MOST_BYTES = 1024 * 1024
"""Of all tensors that come and go, each way over the bus at once; more is as quick under copies."""

# Of those that a slab keeps: the few that come all the time.
_MOST_CALLS = 64

Call = Callable[..., Forward | Backward]


def call_in_place(places: BatchPlaces, library: ModuleType) -> Call | None:
    """The launch of a packed batch on its slab; None if it is better copied: large, or of no rows.

    It takes a registered layer's parameters by name.
    """
    layout = places.layout
    if not places.is_packed or layout.nbytes > MOST_BYTES or layout.is_empty:
        return None
    assert places.slab is not None
    memory = memory_of(places.slab)
    if not isinstance(memory, PinnedMemory):
        # Older than the device's start.
        return None
    call: Call | None = memory.calls.get(layout)
    if call is None:
        if len(memory.calls) >= _MOST_CALLS:
            memory.calls.clear()
        call = memory.calls[layout] = _new_call(layout, memory, library)
    return call


def _new_call(layout: LaunchLayout, memory: PinnedMemory, library: ModuleType) -> Call:
    spec = layout.spec
    inputs = pieces_of(memory.on_device, layout, layout.inputs, 0)
    results = pieces_of(memory.on_device, layout, layout.results, 0)
    came = {name: channels_first(spec, name, tensor) for name, tensor in inputs.items()}
    return call_of(library, spec, came, {"out": destinations(spec, results)})
