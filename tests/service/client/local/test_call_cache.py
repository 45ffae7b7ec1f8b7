"""Calls that come again in shared memory: the same message and the same results, and nothing is kept."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from normserve.client.calls import operations
from normserve.client.calls.array_conversion import TorchCudaTensor
from normserve.client.errors import OverloadedError
from normserve.client.local import device_arena
from normserve.client.local.allocator import HostArena
from normserve.client.local.array_memory import CudaArrayMemory
from normserve.client.local.call_cache import CallCache, CallCaches
from normserve.client.local.device_arena import DeviceArena
from normserve.client.results import ForwardResult, Timing
from normserve.codec import local_messages as frames
from normserve.memory.device_segments import ShareableDevice
from normserve.memory.tensors import DType, HostTensor

from tests.service.client.local.fake_cuda import FakeStream, FakeTorch
from tests.service.client.local.fake_link import FakeLink
from tests.service.client.local.test_device_arena import grow
from tests.service.memory.fake_driver import FakeDriver, bytes_at


class Shown(torch.Tensor):
    """A tensor of the host that says it is on the device."""

    is_cuda = True
    index = 0

    def get_device(self):
        return self.index


@pytest.fixture
def fake():
    return FakeTorch()


@pytest.fixture
def arena(monkeypatch, fake):
    monkeypatch.setattr(device_arena.importlib, "import_module", lambda name: fake)
    made = DeviceArena(ShareableDevice(0, FakeDriver()))
    grow(made, ShareableDevice(0, FakeDriver()), 3)
    return made


@pytest.fixture
def recurring(arena):
    memory = CudaArrayMemory(arena)
    memory._types = frozenset([Shown])
    return CallCache(memory)


def shown(arena) -> Shown:
    block = arena.allocate(4096)
    return arena.make_tensor(block, DType.FLOAT32, (4, 256)).as_subclass(Shown)


def learnt(recurring, arena, x, **options):
    signature = recurring.compute_signature(operations.layer_norm, (x,), options)
    call = operations.layer_norm(x.as_subclass(torch.Tensor), **options)
    object.__setattr__(call, "tensors", {"x": TorchCudaTensor(DType.FLOAT32, x)})
    y = arena.make_tensor(arena.allocate(4096), DType.FLOAT32, (4, 256))
    recurring.try_add_call(signature, call, ForwardResult(y, None, None, None, Timing()))
    return signature


def test_what_is_asked_again_is_the_same_message(recurring, arena):
    x = shown(arena)
    signature = learnt(recurring, arena, x, eps=0.5)
    link = FakeLink()
    result = link.request(recurring, signature)
    (asked,) = link.asked
    assert (asked.op, asked.direction, asked.query) == ("layer_norm", "forward", "eps=0.5")
    assert asked.tensors == {"x": frames.TensorReference(3, 0, "float32", (4, 256))}
    assert arena.locate_tensor(result.y) == (3, asked.results["y"].offset)
    assert (result.mean, result.timing.kernel_bytes) == (None, 7)
    other = link.request(recurring, signature)
    assert other.y.data_ptr() != result.y.data_ptr()
    assert link.asked[1].results != asked.results


def test_results_lie_where_they_lay_before(recurring, arena):
    x, link = shown(arena), FakeLink()
    signature = learnt(recurring, arena, x)

    def place():
        return link.asked[-1].results["y"]

    first = link.request(recurring, signature)
    one = place()
    second = link.request(recurring, signature)
    other = place()
    assert other != one
    for _ in range(3):
        # Whatever else was taken and given back meanwhile.
        del first
        first = link.request(recurring, signature)
        assert place() == one
        arena.allocate(100)
        del second
        second = link.request(recurring, signature)
        assert place() == other
    kept = [link.request(recurring, signature) for _ in range(10)]
    assert len({each.y.data_ptr() for each in (first, second, *kept)}) == 12


def test_calls_differ_by_all_that_they_say(recurring, arena):
    x, y = shown(arena), shown(arena)

    def key(*arguments, **named):
        return recurring.compute_signature(operations.layer_norm, arguments, named)[0]

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
    assert recurring.compute_signature(operations.rms_norm, (x,), {})[0] != key(x)


@pytest.mark.parametrize("strange", [torch.ones(4), [1], object(), SimpleNamespace(is_cuda=True)])
def test_calls_with_anything_else_are_not_known(recurring, arena, strange):
    x = shown(arena)
    assert recurring.compute_signature(operations.layer_norm, (x,), {"bias": strange}) is None
    assert recurring.compute_signature(operations.layer_norm, (x[:, 1:],), {}) is None


def test_a_tensor_of_the_same_device_that_lies_elsewhere_is_copied(recurring, arena):
    made = [torch.full((4, 256), value).as_subclass(Shown) for value in (1.0, 2.0, 3.0)]
    signature, link = learnt(recurring, arena, made[0]), FakeLink()
    for x in made[1:]:
        assert recurring.compute_signature(operations.layer_norm, (x,), {})[0] == signature[0]
        assert link.request(recurring, recurring.compute_signature(operations.layer_norm, (x,), {})) is not None
        place = link.asked[-1].tensors["x"]
        there = bytes_at(arena._segments[place.segment].address + place.offset, x.nbytes)
        assert torch.equal(torch.frombuffer(there, dtype=torch.float32).view(4, 256), x.as_subclass(torch.Tensor))
    assert link.asked[0] == link.asked[1]


def test_what_was_copied_to_in_inference_mode_is_copied_to_outside_of_it(recurring, arena):
    x = torch.ones(4, 256).as_subclass(Shown)
    signature, link = learnt(recurring, arena, x), FakeLink()
    with torch.inference_mode():
        assert link.request(recurring, signature).y.is_inference()
    assert not link.request(recurring, signature).y.is_inference()
    assert link.asked[0] == link.asked[1]


def test_a_result_that_another_stream_still_reads_is_not_written_over(recurring, arena, fake):
    x, link = torch.ones(4, 256).as_subclass(Shown), FakeLink()
    signature = learnt(recurring, arena, x)
    result = link.request(recurring, signature)
    place, default, side = link.asked[-1].results["y"], fake.stream, FakeStream()
    side.is_busy, fake.stream = True, side
    del result
    gc.collect()
    fake.stream = default
    used = []
    for _ in range(6):
        link.request(recurring, signature)
        used += [link.asked[-1].results["y"], link.asked[-1].tensors["x"]]
    assert place.offset not in [each.offset for each in used]
    side.is_busy = False
    link.request(recurring, signature)
    assert link.asked[-1].results["y"] == place


def test_tensors_of_another_device_are_not_known(recurring, arena):
    x = torch.ones(4, 256).as_subclass(Shown)
    x.index = 1
    assert recurring.compute_signature(operations.layer_norm, (x,), {}) is None
    x.index = 0
    assert recurring.compute_signature(operations.layer_norm, (x,), {}) is not None


def test_answers_that_changed_are_asked_for_anew(recurring, arena):
    signature = learnt(recurring, arena, shown(arena))
    for changes in ({"status": 204}, {"shape": (4, 255)}):
        signature = learnt(recurring, arena, shown(arena))
        link = FakeLink()
        vars(link).update(changes)
        assert link.request(recurring, signature) is None
        assert FakeLink().request(recurring, signature) is None


@pytest.mark.parametrize(
    "written",
    [
        b'{"y": {"shape": [4, 256], "dtype": "float32", "offset": 1, "segment": 3}}',
        b'{"y":{"segment":4,"offset":64,"dtype":"float32","shape":[4,256]}}',
    ],
)
def test_results_that_are_told_in_other_words_are_the_same(recurring, arena, written):
    signature = learnt(recurring, arena, shown(arena))
    link = FakeLink()
    link.written = written
    assert all(link.request(recurring, signature) is not None for _ in range(3))
    link.written = None
    assert link.request(recurring, signature) is not None


@pytest.mark.parametrize(
    "written",
    [
        b"{}",
        b"[]",
        b'{"y":{}}',
        b'{"z":{"segment":3,"offset":0,"dtype":"float32","shape":[4,256]}}',
        b'{"y":{"segment":3,"offset":0,"dtype":"float16","shape":[4,256]}}',
    ],
)
def test_results_that_are_others_are_asked_for_anew(recurring, arena, written):
    signature = learnt(recurring, arena, shown(arena))
    link = FakeLink()
    assert link.request(recurring, signature) is not None
    link.written = written
    assert link.request(recurring, signature) is None
    assert FakeLink().request(recurring, signature) is None


def test_a_refusal_is_the_callers_and_the_call_is_learnt_anew(recurring, arena):
    signature = learnt(recurring, arena, shown(arena))
    link = FakeLink()
    link.status = 429
    with pytest.raises(OverloadedError) as refused:
        link.request(recurring, signature)
    assert "the key" not in str(refused.value)
    assert FakeLink().request(recurring, signature) is None


def test_a_layer_whose_results_need_other_ranges_is_asked_for_anew(recurring, arena):
    signature = learnt(recurring, arena, shown(arena))
    link = FakeLink()
    link.status = 422
    assert link.request(recurring, signature) is None
    assert FakeLink().request(recurring, signature) is None


def test_no_tensor_is_kept(recurring, arena):
    x = shown(arena)
    alive = weakref.ref(x)
    signature = learnt(recurring, arena, x)
    del x
    gc.collect()
    assert alive() is None
    assert FakeLink().request(recurring, signature) is not None
    arena.find_busy_stream()
    gc.collect()
    assert arena.allocate(2**21) is not None


def test_an_arena_that_is_full_is_the_slow_ways_to_enlarge(recurring, arena):
    signature = learnt(recurring, arena, shown(arena))
    gc.collect()
    kept = arena.allocate(2**21 - 2048)
    assert kept is not None
    assert FakeLink().request(recurring, signature) is None
    del kept
    assert FakeLink().request(recurring, signature) is not None


def test_each_kind_of_arrays_has_its_own_recurring_calls(arena):
    kinds = CallCaches(HostArena())
    on_device = shown(arena)
    assert kinds.get_cache(on_device) is None
    kinds.add_device_cache(arena)
    first = [np.ones(1), torch.ones(1), on_device]
    found = [kinds.get_cache(x) for x in first]
    assert [kinds.get_cache(x) for x in first] == found
    assert len(set(map(id, found))) == len(first)
    for other in (None, "x", np.float32(1), HostTensor(DType.FLOAT32, (), memoryview(bytes(4)))):
        assert kinds.get_cache(other) is None
