"""The protocol of clients on the same host by hand, with memory of a device that is the host's."""

import os

import numpy as np
from normserve.codec import local_messages as frames
from normserve.memory.device_segments import DeviceSegment, ShareableDevice

from tests.integration.harness.local_wire import LocalConnection
from tests.service.memory.fake_driver import FakeDriver


class DeviceConnection(LocalConnection):
    """With segments of the device's memory."""

    def __init__(self, path, *, greet: bool = True) -> None:
        self.driver = FakeDriver()
        self.mapped: dict[int, DeviceSegment] = {}
        super().__init__(path, greet=greet)

    def grow_device(self, nbytes: int = 1) -> int:
        """The number of a new segment."""
        answer = self.request_device_segment(nbytes)
        assert answer.segment is not None, answer
        return answer.segment

    def request_device_segment(self, nbytes: int) -> frames.LocalResponse:
        """Ask for a segment and map it, if the server grants it."""
        answer = self.request(frames.GrowArenaMessage(nbytes, "device"))
        if answer.segment is not None:
            descriptor = self._descriptors.pop()
            device = ShareableDevice.find_by_uuid(answer.device, self.driver)
            self.mapped[answer.segment] = device.map_descriptor(descriptor, answer.nbytes, DeviceSegment)
            os.close(descriptor)
        return answer

    def view(self, number: int) -> np.ndarray:
        return np.frombuffer(self.content(number), np.float32)

    def content(self, number: int) -> memoryview:
        """The bytes of a segment."""
        return memoryview(self.driver.content(self.mapped[number].address)).cast("B")
