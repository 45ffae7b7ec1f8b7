"""Calls that come again in shared memory: the same message and the same results, and nothing is kept."""

import gc
import os
import weakref
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from normserve.client.calls import operations
from normserve.client.calls.on_device import OnDevice
from normserve.client.errors import OverloadedError
from normserve.client.local import device
from normserve.client.local.arena import Arena
from normserve.client.local.device import DeviceArena
from normserve.client.local.recurring import DeviceMemory, HostMemory, Recurring
from normserve.client.results import ForwardResult, Timing
from normserve.codec import local_frames as frames
from normserve.memory.device_segments import Device
from normserve.memory.host_tensors import DType
from normserve.memory.segments import Segment, make_segment

from tests.service.client.local.fake_cuda import FakeTorch
from tests.service.client.local.test_device import grow
from tests.service.memory.fake_driver import FakeDriver


class Shown(torch.Tensor):
    """A tensor of the host that says it is on the device."""

    is_cuda = True


class FakeLink:
    """Answers with the results where they are wanted, as `shape` says."""

    def __init__(self) -> None:
        self.asked: list[frames.Compute] = []
        self.status, self.shape = 200, (4, 256)

    def request(self, recurring, key):
        """What the clients do, each in its own way."""
        recurring.busy(key)
        again = recurring.begin(key)
        if again is None:
            return None
        told = self._answer(msgspec.json.decode(bytes(again.content), type=frames.Compute))
        again.make_results()
        return recurring.end(key, again, told, "the key")

    def _answer(self, asked):
        self.asked.append(asked)
        if self.status >= 400:
            return frames.Answer(self.status, "id", problem={"code": "overloaded", "detail": "the key"})
        place = asked.results["y"]
        found = {"y": frames.Located(place.segment, place.offset, "float32", self.shape)}
        return frames.Answer(self.status, "id", results=found, stages_ms={"kernel": 1.0}, kernel_bytes=7)


@pytest.fixture
def arena(monkeypatch):
    fake = FakeTorch()
    monkeypatch.setattr(device.importlib, "import_module", lambda name: fake)
    made = DeviceArena(Device(0, FakeDriver()))
    grow(made, Device(0, FakeDriver()), 3)
    return made


@pytest.fixture
def recurring(arena):
    memory = DeviceMemory(arena)
    memory._types = frozenset([Shown])
    return Recurring(memory)


def shown(arena) -> Shown:
    block = arena.take_block(4096)
    return arena.tensor(block, DType.FLOAT32, (4, 256)).as_subclass(Shown)


def learnt(recurring, arena, x, **options):
    key = recurring.key(operations.layer_norm, (x,), options)
    call = operations.layer_norm(x.as_subclass(torch.Tensor), **options)
    object.__setattr__(call, "tensors", {"x": OnDevice(DType.FLOAT32, x)})
    y = arena.tensor(arena.take_block(4096), DType.FLOAT32, (4, 256))
    recurring.learn(key, call, ForwardResult(y, None, None, None, Timing()))
    return key


def test_what_is_asked_again_is_the_same_message(recurring, arena):
    x = shown(arena)
    key = learnt(recurring, arena, x, eps=0.5)
    link = FakeLink()
    result = link.request(recurring, key)
    (asked,) = link.asked
    assert (asked.op, asked.direction, asked.query) == ("layer_norm", "forward", "eps=0.5")
    assert asked.tensors == {"x": frames.Located(3, 0, "float32", (4, 256))}
    assert arena.locate_tensor(result.y) == (3, asked.results["y"].offset)
    assert (result.mean, result.timing.kernel_bytes) == (None, 7)
    other = link.request(recurring, key)
    assert other.y.data_ptr() != result.y.data_ptr()
    assert link.asked[1].results != asked.results


def test_calls_differ_by_all_that_they_say(recurring, arena):
    x, y = shown(arena), shown(arena)

    def key(*arguments, **named):
        return recurring.key(operations.layer_norm, arguments, named)

    keys = [
        key(x),
        key(y),
        key(x[:2]),
        key(x, eps=1.0),
        key(x, eps=1),
        key(x, stats=True),
        key(x, y),
        key(x, bias=y),
    ]
    assert len(set(keys)) == len(keys)
    assert key(x, bias=None) == key(x)
    assert recurring.key(operations.rms_norm, (x,), {}) != key(x)


@pytest.mark.parametrize("strange", [torch.ones(4), [1], object(), SimpleNamespace(is_cuda=True)])
def test_calls_with_anything_else_are_not_known(recurring, arena, strange):
    x = shown(arena)
    assert recurring.key(operations.layer_norm, (x,), {"bias": strange}) is None
    assert recurring.key(operations.layer_norm, (x[:, 1:],), {}) is None


def test_answers_that_changed_are_asked_for_anew(recurring, arena):
    key = learnt(recurring, arena, shown(arena))
    for changes in ({"status": 204}, {"shape": (4, 255)}):
        key = learnt(recurring, arena, shown(arena))
        link = FakeLink()
        vars(link).update(changes)
        assert link.request(recurring, key) is None
        assert FakeLink().request(recurring, key) is None


def test_a_refusal_is_the_callers_and_the_call_is_learnt_anew(recurring, arena):
    key = learnt(recurring, arena, shown(arena))
    link = FakeLink()
    link.status = 429
    with pytest.raises(OverloadedError) as refused:
        link.request(recurring, key)
    assert "the key" not in str(refused.value)
    assert FakeLink().request(recurring, key) is None


def test_no_tensor_is_kept(recurring, arena):
    x = shown(arena)
    alive = weakref.ref(x)
    key = learnt(recurring, arena, x)
    del x
    gc.collect()
    assert alive() is None
    assert FakeLink().request(recurring, key) is not None
    arena.busy_stream()
    gc.collect()
    assert arena.take_block(2**21) is not None


def test_an_arena_that_is_full_is_the_slow_ways_to_enlarge(recurring, arena):
    key = learnt(recurring, arena, shown(arena))
    gc.collect()
    kept = arena.take_block(2**21 - 2048)
    assert kept is not None
    assert FakeLink().request(recurring, key) is None
    del kept
    assert FakeLink().request(recurring, key) is not None


@pytest.fixture
def on_host():
    descriptor, segment = make_segment(2**20, Segment)
    os.close(descriptor)
    arena = Arena()
    arena.add(5, segment)
    return SimpleNamespace(arena=arena, recurring=Recurring(HostMemory(arena)))


def written(arena, dtype="<f4"):
    x = np.frombuffer(arena.take(4096).data, dtype, 1024).reshape(4, 256)
    x[:] = 3
    return x


def learnt_on_host(on_host, x):
    key = on_host.recurring.key(operations.layer_norm, (x,), {})
    y = np.zeros((4, 256), np.float32)
    on_host.recurring.learn(key, operations.layer_norm(x), ForwardResult(y, None, None, None, Timing()))
    return key


def test_arrays_in_the_hosts_memory_are_asked_for_again(on_host):
    x = written(on_host.arena)
    key, link = learnt_on_host(on_host, x), FakeLink()
    result = link.request(on_host.recurring, key)
    (asked,) = link.asked
    assert asked.tensors == {"x": frames.Located(5, 0, "float32", (4, 256))}
    assert (type(result.y), result.y.dtype, result.y.shape) == (np.ndarray, np.float32, (4, 256))
    assert on_host.arena.locate(result.y.data.cast("B")) == (5, asked.results["y"].offset)
    result.y[:] = 1
    assert (x == 3).all()


def test_a_result_keeps_its_block_and_nothing_else_does(on_host):
    x = written(on_host.arena)
    key, link = learnt_on_host(on_host, x), FakeLink()
    row = link.request(on_host.recurring, key).y[1]
    taken = link.asked[0].results["y"]
    assert on_host.arena.take(4096).place != taken
    del row
    assert on_host.arena.take(4096).place == taken


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.copy(),
        lambda x: x[:, 1:],
        lambda x: x.T,
        lambda x: x[1:, :1],
        lambda x: x.reshape(-1)[1:],
        lambda x: x.astype(">f4"),
        lambda x: x.view(">f4"),
        lambda x: x.view("<i4"),
        lambda x: x.view(np.recarray),
        lambda x: np.ma.masked_array(x),
        lambda x: x.tolist(),
        lambda x: torch.from_numpy(x),
    ],
)
def test_arrays_that_must_be_copied_are_not_known(on_host, change):
    x = written(on_host.arena)
    assert on_host.recurring.key(operations.layer_norm, (x,), {}) is not None
    assert on_host.recurring.key(operations.layer_norm, (change(x),), {}) is None
    assert on_host.recurring.key(operations.layer_norm, (x, change(x)), {}) is None


def test_arrays_of_another_shape_or_type_are_other_calls(on_host):
    x = written(on_host.arena)
    arrays = [x, x.reshape(256, 4), x[:2], x[1:], x.view("<f2")]
    assert len({on_host.recurring.key(operations.layer_norm, (array,), {}) for array in arrays}) == len(arrays)
