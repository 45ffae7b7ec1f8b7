"""An arena of two segments in the host's memory."""

import os

import pytest
from normserve.client.local.allocator import HostArena
from normserve.memory.host_segments import HostSegment, make_segment

SEGMENT = 2**16


@pytest.fixture
def arena():
    arena = HostArena()
    for number in (3, 7):
        descriptor, segment = make_segment(SEGMENT, HostSegment)
        os.close(descriptor)
        arena.add_segment(number, segment)
    return arena
