"""Messages about memory of the server's GPU, lies among them; needs a GPU."""

import pytest
import torch
from normserve.codec import local_messages as frames
from normserve.memory.device_segments import DeviceSegment, ShareableDevice
from torch import nn

from tests.integration.clients.device.serving import random
from tests.integration.harness.local_wire import LocalConnection

pytestmark = pytest.mark.gpu

MIB = 2**20


class Wire(LocalConnection):
    """With segments of the device's memory."""

    def grow_device(self, nbytes: int = MIB):
        answer = self.request(frames.GrowArenaMessage(nbytes, "device"))
        assert answer.status == 200, answer
        mapped = ShareableDevice.find_by_uuid(answer.device).map_descriptor(
            self._descriptors.pop(), answer.nbytes, DeviceSegment
        )
        return answer.segment, torch.as_tensor(mapped.view(), device="cuda").view(torch.float32)


@pytest.fixture
def wire(serving, path):
    with Wire(path) as wire:
        yield wire


def forward(segment, *, x=0, y=4096, of_y=None, shape=(4, 256)):
    return frames.ComputeMessage(
        op="layer_norm",
        tensors={"x": frames.TensorReference(segment, x, "float32", shape)},
        results={"y": frames.SegmentRange(segment if of_y is None else of_y, y, 4096)},
    )


def test_y_over_x_and_beside_it(wire):
    number, memory = wire.grow_device()
    rows = random(4, 256)
    right = nn.functional.layer_norm(rows, (256,))
    for y in (4096, 0):
        memory[:1024] = rows.flatten()
        torch.cuda.synchronize()
        assert wire.request(forward(number, y=y)).status == 200
        torch.testing.assert_close(memory[y // 4 :][:1024].view(4, 256), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"x": -4080}, "end within its segment"),
        ({"y": -4080}, "end within its segment"),
        ({"x": 2**62}, "end within its segment"),
        ({"x": 8}, "multiple of 16"),
        ({"y": 4080}, "overlap"),
        ({"y": 2**63 - 16}, "end within its segment"),
        ({"shape": (2**40, 2**22)}, ""),
    ],
)
def test_references_that_lie(wire, changes, text):
    number, memory = wire.grow_device()
    # From the segment's end.
    changes = {name: memory.nbytes + at if name != "shape" and at < 0 else at for name, at in changes.items()}
    answer = wire.request(forward(number, **changes))
    assert 400 <= answer.status < 500
    assert text in answer.problem["detail"]
    assert wire.request(forward(number)).status == 200


def test_memories_do_not_mix_and_segments_are_a_connections_own(wire, path):
    number, _ = wire.grow_device()
    of_host = wire.request(frames.GrowArenaMessage(MIB)).segment
    assert "all in device memory" in wire.request(forward(number, of_y=of_host)).problem["detail"]
    assert wire.request(forward(number)).status == 200
    with Wire(path) as other:
        assert other.request(forward(number)).status == 422


def test_a_segment_that_is_given_back_is_of_no_use(wire):
    number, _ = wire.grow_device()
    wire.send(frames.FreeSegmentMessage(number))
    assert wire.request(forward(number)).status == 422
    again, memory = wire.grow_device()
    assert again != number
    assert not memory.any()
