"""The client's arena in device memory: what lies there is named, and no place is used again before its time."""

import gc
import os
from types import SimpleNamespace

import pytest
import torch
from normserve.client import OverloadedError, UnexpectedAnswerError
from normserve.client.calls import operations
from normserve.client.calls.array_conversion import TorchCudaTensor
from normserve.client.local import device_arena
from normserve.client.local.client_protocol import LocalClientProtocol
from normserve.client.local.device_arena import BusyStream, DeviceArena, try_make_device_arena
from normserve.client.local.device_messages import (
    allocate_device_block,
    get_device_x,
    make_device_response,
    prepare_device_call,
)
from normserve.codec import local_messages as frames
from normserve.memory import device_segments
from normserve.memory.device_segments import DeviceSegment, ShareableDevice
from normserve.memory.tensors import DType

from tests.garbage_collector import without_collector
from tests.service.client.local.fake_cuda import FakeTorch
from tests.service.memory.fake_driver import GRANULARITY, FakeDriver


@pytest.fixture
def fake(monkeypatch):
    made = FakeTorch()
    monkeypatch.setattr(device_arena.importlib, "import_module", lambda name: made)
    return made


@pytest.fixture
def server():
    return ShareableDevice(0, FakeDriver())


@pytest.fixture
def arena(fake, server):
    made = DeviceArena(ShareableDevice(0, FakeDriver()))
    grow(made, server, 3)
    return made


def grow(arena, server, number, nbytes=GRANULARITY):
    segment = server.allocate_zeroed(nbytes, DeviceSegment)
    descriptor = server.export_descriptor(segment)
    try:
        arena.add_device_segment(number, descriptor, len(segment))
    finally:
        os.close(descriptor)
    return segment


def taken(arena, nbytes):
    block = arena.allocate(nbytes)
    assert block is not None
    return block


def finished(needs):
    """What a generator comes to that needs nothing more."""
    with pytest.raises(StopIteration) as done:
        next(needs)
    return done.value.value


@pytest.mark.parametrize("dtype", DType)
def test_a_tensor_keeps_its_place_until_its_last_view_is_gone(arena, dtype):
    block = taken(arena, 2**20)
    place = block.segment_range
    tensor = arena.make_tensor(block, dtype, (4, 8))
    assert tensor.dtype == getattr(torch, dtype.value)
    assert arena.locate_tensor(tensor) == (3, place.offset)
    assert arena.locate_tensor(tensor[2:]) == (3, place.offset + 16 * dtype.itemsize)
    assert arena.locate_tensor(tensor[:, 1:]) is None
    assert arena.locate_tensor(torch.ones(4)) is None
    view = tensor[1:].view(-1)
    del block, tensor
    gc.collect()
    assert arena.allocate(GRANULARITY) is None
    del view
    gc.collect()
    assert taken(arena, GRANULARITY).segment_range.offset == 0


def test_a_place_waits_for_the_stream_that_it_died_on(arena, fake):
    block = taken(arena, GRANULARITY)
    fake.stream.is_busy = True
    del block
    assert arena.allocate(1) is None
    busy, fake.stream = fake.stream, type(fake.stream)()
    assert arena.allocate(1) is None
    busy.is_busy = False
    assert arena.allocate(GRANULARITY) is not None


def test_a_place_that_died_in_a_capture_is_never_used_again(arena, fake):
    block = taken(arena, GRANULARITY)
    fake.stream.is_captured = True
    del block
    fake.stream.is_captured = False
    assert arena.allocate(1) is None


def test_what_another_thread_puts_on_the_stream_meanwhile_is_not_taken_for_done(arena, fake):
    early, late = taken(arena, GRANULARITY // 2), taken(arena, GRANULARITY // 2)
    del early
    held = [late]
    query = fake.stream.query

    def interrupted():
        is_idle = query()
        held.clear()
        return is_idle

    del late
    fake.stream.query = interrupted
    assert arena.find_busy_stream() is None
    fake.stream.query = query
    assert arena._returned_ranges
    assert len(arena._pending_returns) == 1


def test_a_call_is_not_captured(arena, fake):
    fake.stream.is_captured = True
    with pytest.raises(RuntimeError, match="captured"):
        arena.find_busy_stream()
    fake.stream.is_captured = False


def test_the_end_waits_for_the_device(arena, fake):
    ended = []
    early, late = taken(arena, 64), taken(arena, 64)
    fake.stream.is_busy = True
    del early
    arena.call_when_empty(lambda: ended.append(True))
    assert not ended
    assert fake.stream.waits == 1
    fake.stream.is_busy = True
    del late
    assert ended
    assert fake.stream.waits == 2


def test_what_is_mapped_goes_after_the_device_is_done(arena, fake):
    # Arenas of tests before may be in reference cycles.
    gc.collect()
    before = fake.synchronised
    arena.unmap_segments()
    gc.collect()
    assert fake.synchronised == before + 1


def test_what_is_mapped_goes_at_once_while_torch_has_not_initialised_cuda(arena, fake):
    # It may be collected while torch does, and would wait for itself.
    gc.collect()
    before, driver = fake.synchronised, arena._device.driver
    fake.cuda.is_initialized = lambda: False
    assert driver.mappings
    arena.unmap_segments()
    gc.collect()
    assert fake.synchronised == before
    assert not driver.mappings


def test_memory_that_is_none_is_refused(arena):
    descriptor = os.memfd_create("plain")
    with pytest.raises(ValueError, match="cannot be mapped"):
        arena.add_device_segment(4, descriptor, GRANULARITY)
    os.close(descriptor)


@pytest.mark.parametrize("offer", [None, 7, {}, {"uuid": 3}, {"uuid": "00" * 16}])
def test_what_is_no_offer_for_this_process(offer, monkeypatch):
    monkeypatch.setattr("normserve.memory.device_segments._import_driver", FakeDriver)
    assert try_make_device_arena(offer) is None


def test_an_offer_of_a_device_that_this_process_sees(fake, monkeypatch):
    monkeypatch.setattr(device_segments, "_import_driver", FakeDriver)
    # Servers of older versions say more.
    made = try_make_device_arena({"uuid": ShareableDevice(0, FakeDriver()).uuid, "own": True})
    assert made is not None
    assert made.ordinal == 0


def call_of(x, **more):
    call = operations.layer_norm(x, **more)
    tensors = dict(call.tensors or {})
    tensors["x"] = TorchCudaTensor(DType.FLOAT32, OnFake(x))
    object.__setattr__(call, "tensors", tensors)
    return call


class OnFake:
    """What torch's tensor shows of itself to the client, on a device whose memory is the host's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.device = SimpleNamespace(index=0)

    def __getattr__(self, name):
        return getattr(self._tensor, name)

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        unwrapped = [each._tensor if isinstance(each, OnFake) else each for each in arguments]
        return function(*unwrapped, **(options or {}))


def test_calls_name_what_lies_there_and_copy_the_rest(arena):
    x = arena.make_tensor(taken(arena, 4096), DType.FLOAT32, (4, 256)).fill_(2)
    call = call_of(x, weight=torch.ones(256))
    assert get_device_x(call) is not None
    prepared = finished(prepare_device_call(call, arena))
    message = prepared.message
    assert message.tensors["x"] == frames.TensorReference(3, 0, "float32", (4, 256))
    weight = message.tensors["weight"]
    assert weight.segment == 3
    assert len(prepared.retained_inputs) == 2
    assert prepared.retained_inputs[1].tolist() == [1.0] * 256
    answer = frames.LocalResponse(200, results={"y": frames.TensorReference(3, 64, "float32", (4, 256))})
    tensors = make_device_response(answer, arena, prepared.result_blocks).read_tensors()
    found = arena.locate_tensor(tensors["y"].view_tensor)
    assert found == (3, message.results["y"].offset)


def test_calls_wait_for_the_stream_and_ask_for_memory(arena, fake, server):
    x = torch.ones(GRANULARITY // 4, 2)
    fake.stream.is_busy = True
    needs = prepare_device_call(call_of(x), arena)
    busy = next(needs)
    assert isinstance(busy, BusyStream)
    busy.wait_idle()
    assert fake.stream.waits == 1
    assert next(needs) == 2 * GRANULARITY
    grow(arena, server, 4, 2 * GRANULARITY)
    assert next(needs) == 2 * GRANULARITY
    grow(arena, server, 5, 2 * GRANULARITY)
    message = finished(needs).message
    assert (message.tensors["x"].segment, message.results["y"].segment) == (4, 5)


@pytest.mark.parametrize(
    "located",
    [
        frames.TensorReference(3, 0, "float64", (4,)),
        frames.TensorReference(3, 0, "float32", (2**20, 2**20)),
    ],
)
def test_answers_that_lie(arena, located):
    prepared = finished(prepare_device_call(call_of(torch.ones(4, 256)), arena))
    answer = make_device_response(frames.LocalResponse(200, results={"y": located}), arena, prepared.result_blocks)
    with pytest.raises(UnexpectedAnswerError):
        answer.read_tensors()
    unknown = frames.LocalResponse(200, results={"z": frames.TensorReference(3, 0, "float32", (4,))})
    with pytest.raises(UnexpectedAnswerError):
        make_device_response(unknown, arena, prepared.result_blocks).read_tensors()


def test_a_place_that_another_library_may_read_waits_for_the_whole_device(arena, fake, monkeypatch):
    monkeypatch.setattr(device_arena, "EXPORTED_DEVICES", {arena.ordinal})
    before = fake.synchronised
    block = taken(arena, GRANULARITY)
    del block
    assert fake.synchronised == before
    assert arena.allocate(GRANULARITY) is not None
    assert fake.synchronised == before + 1


def test_the_end_waits_for_the_whole_device_if_another_library_may_read(arena, fake, monkeypatch):
    monkeypatch.setattr(device_arena, "EXPORTED_DEVICES", {arena.ordinal})
    ended = []
    before = fake.synchronised
    early, late = taken(arena, 64), taken(arena, 64)
    del early
    arena.call_when_empty(lambda: ended.append(True))
    assert fake.synchronised == before + 1
    assert not ended
    del late
    assert ended
    assert fake.synchronised == before + 2


def refuse_memory(arena, nbytes):
    """The error of a client whose request for device memory the server refuses; None if it then has the memory."""
    protocol = LocalClientProtocol(None)
    exchanges = protocol._run_device_arena_steps(allocate_device_block(arena, nbytes), arena)
    refusal = frames.LazyLocalResponse(429, problem={"code": "overloaded"})
    next(exchanges)
    try:
        while True:
            exchanges.send(refusal)
    except StopIteration:
        return None
    except OverloadedError as error:
        return error


def test_before_a_refusal_tensors_that_are_garbage_make_room(arena):
    with without_collector():
        ring = [arena.make_tensor(taken(arena, GRANULARITY), DType.FLOAT32, (GRANULARITY // 4,))]
        ring.append(ring)
        del ring
        assert refuse_memory(arena, GRANULARITY) is None
