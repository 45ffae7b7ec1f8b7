"""When a closed connection leaves: with the last block of its arenas, however that block is collected."""

import gc
import os
import socket
import warnings
import weakref

from normserve.client.local.allocator import HostArena
from normserve.client.local.device_arena import DeviceMemoryOffer
from normserve.memory.host_segments import HostSegment, make_segment


class Link:
    """Of the client's, what an arena refers to."""

    def __init__(self) -> None:
        self.arena = HostArena()
        self.socket = socket.socket()
        descriptor, segment = make_segment(2**16, HostSegment)
        os.close(descriptor)
        self.arena.add_segment(0, segment)

    def encode_free_all(self) -> None:
        self.socket.close()


def test_a_block_in_a_reference_cycle_leaves_no_open_socket():
    link = Link()
    cycle: list[object] = [link.arena.allocate(64)]
    cycle.append(cycle)
    DeviceMemoryOffer().call_when_empty(link.arena, link.encode_free_all)
    left = weakref.ref(link)
    del link
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del cycle
        gc.collect()
    assert not warned
    gc.collect()
    assert left() is None


def test_memory_that_a_captured_graph_uses_stays_mapped():
    link = Link()
    block = link.arena.allocate(64)
    assert block is not None
    # As device memory whose last view died while a graph was captured: it does not return.
    place, block.arena = block.segment_range, None
    DeviceMemoryOffer().call_when_empty(link.arena, link.encode_free_all)
    left = weakref.ref(link)
    del link, block
    gc.collect()
    kept = left()
    assert kept is not None
    kept.arena.enqueue_release(place)
    del kept
    gc.collect()
    assert left() is None
