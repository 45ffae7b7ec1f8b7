"""A front end that notes what it is told."""

import numpy as np
from normserve.http.relay import relay_messages
from normserve.memory.shared_slabs import SharedSlabRegistry
from normserve.memory.slabs import SlabPool


class FakeFrontEnd:
    def __init__(self, source=None):
        self.shared = SharedSlabRegistry()
        self.slab_pool = SlabPool(max_idle_bytes=2**20, source=source or self.shared.make_allocator())
        self.said = []

    def send_message(self, message):
        self.said.append(message)

    def locate_and_share_slab(self, view):
        return self.shared.locate(view)

    def end_request(self, number):
        self.said.append(("end", number))

    def write(self, receive, data):
        """What a front end does to a place."""
        target = self._memory(receive.slab_number)
        target[receive.offset : receive.offset + len(data)] = np.frombuffer(data, np.uint8)

    def body_of(self, response: relay_messages.CompleteResponse) -> bytes:
        """What a front end would send of a response."""
        parts = [
            bytes(self._memory(part.slab_number)[part.offset : part.offset + part.nbytes])
            if isinstance(part, relay_messages.SharedSlabRange)
            else part
            for part in response.body
        ]
        return b"".join(parts)

    def _memory(self, number):
        (memory,) = [each for each in self.shared._slabs_by_address.values() if each.number == number]
        place = (np.ctypeslib.ctypes.c_char * memory.nbytes).from_address(memory.address)
        return np.frombuffer(place, np.uint8)
