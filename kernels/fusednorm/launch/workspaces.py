"""Memory that consecutive launches of a stream share; each launch leaves it ready for the next."""

from fusednorm.arguments.arrays import Array, Workspace
from fusednorm.devices.device_properties import GpuModel

EXCHANGE_BUFFER, COUNTERS = "exchange_buffer", "counters"


def get_exchange_buffer(device: GpuModel, slots: int) -> Array:
    """Return the workspace of `jit.program_exchange` for a launch with a total of `slots` slots."""
    return _shared(device, 2 + 4 * slots, EXCHANGE_BUFFER)


def get_counters(device: GpuModel, count: int) -> Array:
    """Return at least `count` int64 counters, all 0; a launch must leave them at 0."""
    return _shared(device, count, COUNTERS)


def _shared(device: GpuModel, words: int, purpose: str) -> Array:
    """Return a workspace of at least `words` 8-byte words."""
    count = 1 << words.bit_length()
    return Array(Workspace("int64", count, purpose), "int64", (count,), (1,), device)
