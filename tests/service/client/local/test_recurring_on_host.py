"""Calls that come again with arrays in shared host memory, of numpy and of torch."""

import os
from types import SimpleNamespace

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


class Shown(torch.Tensor):
    """A tensor of a subclass."""


@pytest.fixture
def on_host():
    descriptor, segment = make_segment(2**20, HostSegment)
    os.close(descriptor)
    arena = HostArena()
    arena.add_segment(5, segment)
    return SimpleNamespace(arena=arena, call_caches=CallCache(NumpyArrayMemory(arena)))


def written(arena, dtype="<f4"):
    x = np.frombuffer(arena.allocate(4096).data, dtype, 1024).reshape(4, 256)
    x[:] = 3
    return x


def learnt_on_host(on_host, x):
    signature = on_host.call_caches.compute_signature(operations.layer_norm, (x,), {})
    y = np.zeros((4, 256), np.float32)
    on_host.call_caches.try_add_call(
        signature, operations.layer_norm(x), ForwardResult(y, None, None, None, Timing())
    )
    return signature


def test_arrays_in_the_hosts_memory_are_asked_for_again(on_host):
    x = written(on_host.arena)
    signature, link = learnt_on_host(on_host, x), FakeLink()
    result = link.request(on_host.call_caches, signature)
    (asked,) = link.asked
    assert asked.tensors == {"x": frames.TensorReference(5, 0, "float32", (4, 256))}
    assert (type(result.y), result.y.dtype, result.y.shape) == (np.ndarray, np.float32, (4, 256))
    assert on_host.arena.locate(result.y.data.cast("B")) == (5, asked.results["y"].offset)
    result.y[:] = 1
    assert (x == 3).all()


def test_a_result_keeps_its_block_and_nothing_else_does(on_host):
    x = written(on_host.arena)
    signature, link = learnt_on_host(on_host, x), FakeLink()
    row = link.request(on_host.call_caches, signature).y[1]
    taken = link.asked[0].results["y"]
    assert on_host.arena.allocate(4096).segment_range != taken
    del row
    assert on_host.arena.allocate(4096).segment_range == taken


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, 1:],
        lambda x: x.T,
        lambda x: x[1:, :1],
        lambda x: x.astype(">f4"),
        lambda x: x.view(">f4"),
        lambda x: x.view("<i4"),
        lambda x: x.view(np.recarray),
        lambda x: np.ma.masked_array(x),
        lambda x: x.tolist(),
        lambda x: torch.from_numpy(x),
    ],
)
def test_arrays_that_are_no_plain_bytes_are_not_known(on_host, change):
    x = written(on_host.arena)
    assert on_host.call_caches.compute_signature(operations.layer_norm, (x,), {}) is not None
    assert on_host.call_caches.compute_signature(operations.layer_norm, (change(x),), {}) is None
    assert on_host.call_caches.compute_signature(operations.layer_norm, (x, change(x)), {}) is None


def test_arrays_of_another_shape_or_type_are_other_calls(on_host):
    x = written(on_host.arena)
    arrays = [x, x.reshape(256, 4), x[:2], x[1:], x.view("<f2")]
    assert len(
        {on_host.call_caches.compute_signature(operations.layer_norm, (array,), {})[0] for array in arrays}
    ) == len(arrays)


@pytest.fixture
def in_torch(on_host):
    return SimpleNamespace(arena=on_host.arena, call_caches=CallCache(TorchArrayMemory(on_host.arena)))


def filled(arena, dtype=torch.float32):
    return torch.frombuffer(arena.allocate(4096).data, dtype=dtype).view(4, -1).fill_(3)


def learnt_in_torch(in_torch, x):
    signature = in_torch.call_caches.compute_signature(operations.layer_norm, (x,), {})
    y = torch.zeros(4, 256)
    in_torch.call_caches.try_add_call(
        signature, operations.layer_norm(x), ForwardResult(y, None, None, None, Timing())
    )
    return signature


def test_tensors_in_host_memory_are_asked_for_again(in_torch):
    x = filled(in_torch.arena)
    signature, link = learnt_in_torch(in_torch, x), FakeLink()
    result = link.request(in_torch.call_caches, signature)
    (asked,) = link.asked
    assert asked.tensors == {"x": frames.TensorReference(5, 0, "float32", (4, 256))}
    assert (type(result.y), result.y.dtype, result.y.shape) == (torch.Tensor, torch.float32, (4, 256))
    assert in_torch.arena.locate_address(result.y.data_ptr()) == (5, asked.results["y"].offset)
    result.y.fill_(1)
    assert (x == 3).all()


@pytest.mark.parametrize("dtype", list(DType))
def test_results_in_torch_are_of_every_type_and_keep_their_block(in_torch, dtype):
    arena = in_torch.arena
    block = arena.allocate(8 * dtype.itemsize)
    place = block.segment_range
    y = TorchArrayMemory(arena).make_array_factory(dtype, (2, 4))(block)
    assert (y.dtype, y.shape, y.is_contiguous()) == (getattr(torch, dtype.label), (2, 4), True)
    y.view(torch.uint8).fill_(1)
    assert block[: 8 * dtype.itemsize].sum() == 8 * dtype.itemsize
    del block
    row = y[1].detach()
    del y
    assert arena.allocate(place.nbytes).segment_range != place
    del row
    assert arena.allocate(place.nbytes).segment_range == place


def test_a_result_in_torch_keeps_its_block_and_nothing_else_does(in_torch):
    x = filled(in_torch.arena)
    signature, link = learnt_in_torch(in_torch, x), FakeLink()
    row = link.request(in_torch.call_caches, signature).y[1]
    taken = link.asked[0].results["y"]
    assert in_torch.arena.allocate(4096).segment_range != taken
    del row
    assert in_torch.arena.allocate(4096).segment_range == taken


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, 1:],
        lambda x: x.t(),
        lambda x: x._neg_view(),
        lambda x: x.as_subclass(Shown),
        lambda x: x.to("meta"),
        lambda x: x.numpy(),
        lambda x: x.tolist(),
    ],
)
def test_tensors_that_are_no_plain_bytes_are_not_known(in_torch, change):
    x = filled(in_torch.arena)
    assert in_torch.call_caches.compute_signature(operations.layer_norm, (x,), {}) is not None
    assert in_torch.call_caches.compute_signature(operations.layer_norm, (change(x),), {}) is None
    assert in_torch.call_caches.compute_signature(operations.layer_norm, (x, change(x)), {}) is None


def test_tensors_of_another_shape_or_type_are_other_calls(in_torch):
    x = filled(in_torch.arena)
    tensors = [x, x.view(256, 4), x[:2], x[1:], x.view(torch.float16), x.view(torch.bfloat16)]
    assert len(
        {in_torch.call_caches.compute_signature(operations.layer_norm, (each,), {})[0] for each in tensors}
    ) == len(tensors)
