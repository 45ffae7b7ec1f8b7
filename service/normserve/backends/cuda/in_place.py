"""Small batches in pinned memory: one launch reads the inputs and writes the results directly, without copies.

A copy to or from the device takes several microseconds before its first byte is transferred, and the kernel as
many to start after it.  A kernel that reads host memory waits for the bus only once.
"""

from collections.abc import Callable
from types import ModuleType

from fusednorm.results import Backward, Forward

from normserve.backends.cuda.batch_buffers import BatchBuffers, LaunchLayout, view_input_slices, view_result_slices
from normserve.backends.cuda.pinned import PinnedArray
from normserve.backends.library_calls import bind_operation, make_output_argument
from normserve.backends.tensor_conversion import move_channels_first
from normserve.memory.slabs import get_slab_memory

MOST_BYTES = 1024 * 1024
"""Limit of the bytes of all inputs and results, which cross the bus in both directions at once; copies are as
quick for more.
"""

# Limit of the calls that a slab keeps, for frequent layouts.
_MOST_CALLS = 64

Call = Callable[..., Forward | Backward]


def get_in_place_call(places: BatchBuffers, library: ModuleType) -> Call | None:
    """Return a function that launches the kernels directly on a packed batch's pinned slab, without copies; or
    return None.

    None if copies are better, as the batch is large or not packed, or if it has no rows or its slab is
    not pinned. The function takes a registered layer's parameters by name, and is kept for later
    batches in the slab.
    """
    layout = places.layout
    if not places.is_packed or layout.nbytes > MOST_BYTES or layout.is_empty:
        return None
    assert places.slab is not None
    memory = get_slab_memory(places.slab)
    if not isinstance(memory, PinnedArray):
        # Older than the device's start.
        return None
    call: Call | None = memory.calls.get(layout)
    if call is None:
        if len(memory.calls) >= _MOST_CALLS:
            memory.calls.clear()
        call = memory.calls[layout] = _bind_call_to_slab(layout, memory, library)
    return call


def _bind_call_to_slab(layout: LaunchLayout, memory: PinnedArray, library: ModuleType) -> Call:
    """Bind the library's function to tensors at the layout's offsets in a slab's memory."""
    spec = layout.spec
    inputs = view_input_slices(memory.device_tensor, layout)
    results = view_result_slices(memory.device_tensor, layout, 0)
    arguments = {name: move_channels_first(spec, name, tensor) for name, tensor in inputs.items()}
    return bind_operation(library, spec, arguments, {"out": make_output_argument(spec, results)})
