"""Calls whose tensors lie elsewhere: copied to where the server has been asked for them before."""

import os
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from normserve.client.calls import operations
from normserve.client.local.allocator import HostArena
from normserve.client.local.array_memory import NumpyArrayMemory, TorchArrayMemory
from normserve.client.local.call_cache import CallCache
from normserve.client.results import ForwardResult, Timing
from normserve.codec import local_messages as frames
from normserve.memory.host_segments import HostSegment, make_segment
from normserve.memory.tensors import DType

from tests.service.client.local.fake_link import FakeLink

MEMORIES = {"numpy": NumpyArrayMemory, "torch": TorchArrayMemory}


@pytest.fixture(params=MEMORIES)
def here(request):
    """An arena, its calls, and how an array of the kind is made."""
    descriptor, segment = make_segment(2**20, HostSegment)
    os.close(descriptor)
    arena = HostArena()
    arena.add_segment(5, segment)

    def make(value, shape=(4, 256)):
        array = np.full(shape, value, np.float32)
        return array if request.param == "numpy" else torch.from_numpy(array)

    return SimpleNamespace(arena=arena, call_caches=CallCache(MEMORIES[request.param](arena)), make=make)


def learn(here, *arguments, **named):
    signature = here.call_caches.compute_signature(operations.layer_norm, arguments, named)
    result = ForwardResult(here.make(0), None, None, None, Timing())
    here.call_caches.try_add_call(signature, operations.layer_norm(*arguments, **named), result)


def ask(here, link, *arguments, **named):
    return link.request(
        here.call_caches, here.call_caches.compute_signature(operations.layer_norm, arguments, named)
    )


def held(here, located):
    """What the arena has at a place."""
    part = here.arena._segments[located.segment]
    return np.ndarray(located.shape, located.dtype, part.mapping, located.offset)


def test_a_call_is_known_wherever_its_tensors_lie(here):
    learn(here, here.make(1), here.make(2, (256,)), bias=here.make(3, (256,)), eps=0.5)
    link = FakeLink()
    for values in ((4, 5, 6), (7, 8, 9)):
        x, weight, bias = (here.make(value, (4, 256) if value % 3 == 1 else (256,)) for value in values)
        assert ask(here, link, x, weight, bias=bias, eps=0.5) is not None
        asked = link.asked[-1].tensors
        assert [float(held(here, asked[name]).min()) for name in ("x", "weight", "bias")] == [*values]
        assert [float(held(here, asked[name]).max()) for name in ("x", "weight", "bias")] == [*values]
    assert link.asked[0] == link.asked[1]


def test_a_long_answer_is_not_kept(here):
    learn(here, here.make(1))
    link = FakeLink()
    assert ask(here, link, here.make(2)) is not None
    (asked,) = next(iter(here.call_caches.calls.values())).encoded_calls
    kept = asked.encoded_results
    assert kept is not None
    place = link.asked[0].results["y"]
    found = {"y": frames.TensorReference(place.segment, place.offset, "float32", link.shape)}
    link.written = msgspec.json.encode(found) + b" " * 2**19
    assert ask(here, link, here.make(3)) is not None
    assert bytes(asked.encoded_results) == bytes(kept)


def test_some_tensors_lie_in_shared_memory_and_some_elsewhere(here):
    shared = np.frombuffer(here.arena.allocate(1024).data, np.float32, 256)
    shared[:] = 2
    weight = shared if isinstance(here.make(0), np.ndarray) else torch.from_numpy(shared)
    learn(here, here.make(1), weight)
    link = FakeLink()
    ask(here, link, here.make(3), weight)
    asked = link.asked[0].tensors
    assert here.arena.locate_address(shared.ctypes.data) == (asked["weight"].segment, asked["weight"].offset)
    assert (held(here, asked["x"]) == 3).all()
    assert (shared == 2).all()


def test_what_lies_at_no_multiple_of_an_elements_size_is_copied(here):
    learn(here, here.make(1))
    x = np.frombuffer(here.arena.allocate(8192).data[4:], np.float32, 1024).reshape(4, 256)
    x[:] = 3
    link = FakeLink()
    ask(here, link, x if isinstance(here.make(0), np.ndarray) else torch.from_numpy(x))
    asked = link.asked[0].tensors["x"]
    assert asked.offset % 16 == 0
    assert (held(here, asked) == 3).all()


def test_copies_and_results_of_calls_at_the_same_time_lie_apart(here):
    learn(here, here.make(1))
    link = FakeLink()
    kept = [ask(here, link, here.make(value)) for value in range(6)]
    assert len({asked.results["y"].offset for asked in link.asked}) == len(kept)
    spans = [(asked.tensors["x"].offset, asked.results["y"].offset) for asked in link.asked]
    assert all(x != y for x, y in spans)
    # A copy is nobody's once there is an answer.
    assert not {y for _, y in spans} & {x for x, _ in spans[-1:]}


def test_parameters_that_are_arrays_are_no_part_of_a_known_call(here):
    learn(
        here,
        here.make(1),
        eps=np.array(0.5, np.float32) if isinstance(here.make(0), np.ndarray) else torch.tensor(0.5),
    )
    assert not here.call_caches.calls


def test_several_parameters_that_lie_elsewhere_are_not_known(here):
    signature = here.call_caches.compute_signature(
        operations.layer_norm_chain, (here.make(1), [here.make(2, (256,))]), {}
    )
    assert signature is None


@pytest.mark.parametrize("here", ["torch"], indirect=True)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_tensors_of_every_type_of_torch_are_copied(here, dtype):
    source = torch.arange(1.0, 15.0).to(getattr(torch, dtype.label)).view(2, 7)
    memory, block = TorchArrayMemory(here.arena), here.arena.allocate(source.nbytes)
    memory.copy_or_enqueue_all([memory.make_copy_target(dtype, (2, 7), block.segment_range)], [source])
    assert torch.equal(torch.frombuffer(block.data, dtype=source.dtype)[:14].view(2, 7), source)


@pytest.mark.parametrize("here", ["torch"], indirect=True)
def test_nothing_of_a_tensors_derivative_is_kept(here):
    learn(here, here.make(1).requires_grad_())
    link = FakeLink()
    result = ask(here, link, here.make(2).requires_grad_())
    assert (held(here, link.asked[0].tensors["x"]) == 2).all()
    assert not result.y.requires_grad
