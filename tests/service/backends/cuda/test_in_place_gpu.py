"""Small batches that the CUDA backend computes in pinned memory: the bits are those of copies; needs a GPU."""

import os
from itertools import product

import fusednorm
import pytest
import torch
from fusednorm import reference
from normserve.backends.cuda import in_place
from normserve.jobs.job import ROW_OPS, Batch, ChannelLayout, NormJob, NormSpec, Op, PassDirection, ReplaySlot
from normserve.memory.host_segments import HostSegment, make_segment
from normserve.memory.slabs import SlabPool
from normserve.memory.tensors import HostTensor

from tests.service.backends.answers import assert_right
from tests.service.backends.cuda.on_gpu import backend, run
from tests.service.jobs.fake_jobs import layer
from tests.service.memory.host_tensors import DTYPES, back, host

__all__ = ["backend"]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


def in_and_out(op: Op, direction: PassDirection, layout: ChannelLayout | None, dtype: torch.dtype) -> list[NormJob]:
    """Jobs of one and of three rows or samples, small enough to be computed in place."""
    forward, grouped = direction is PassDirection.FORWARD, op is Op.GROUP_NORM
    jobs = []
    parameters = {} if grouped or not forward else {"weight": torch.randn(64 if layout else 640)}
    for count in (1, 3):
        shape = (
            (count, 640)
            if layout is None
            else (count, 7, 5, 64)
            if layout is ChannelLayout.NHWC
            else (count, 64, 7, 5)
        )
        names = ("x", "residual") if forward else ("x", "dy", "dresidual_out")
        tensors = {name: torch.randn(shape).to(dtype) for name in names} | parameters
        if grouped or (layout and forward):
            tensors |= {"scale": torch.randn(count, 64), "shift": torch.randn(count, 64).to(dtype)}
            if not grouped:
                tensors["gate"] = torch.randn(count, 64)
        spec = NormSpec(op, direction, 1e-5, 8 if grouped else 0, layout, activation="silu", stats=forward)
        jobs.append(NormJob(spec, {name: host(tensor) for name, tensor in tensors.items()}))
    return jobs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", PassDirection)
@pytest.mark.parametrize(
    ("op", "layout"), [*product(ROW_OPS, (None, ChannelLayout.NCHW)), *product((Op.GROUP_NORM,), ChannelLayout)]
)
def test_in_place_the_bits_are_those_of_copies(backend, op, direction, layout, dtype, monkeypatch):
    jobs = in_and_out(op, direction, layout, dtype)
    assert (
        in_place.get_in_place_call(backend._buffer_allocator.prepare_buffers(Batch(tuple(jobs))), fusednorm)
        is not None
    )
    together = run(backend, *jobs)
    alone = [run(backend, job)[0] for job in jobs]
    monkeypatch.setattr(in_place, "MOST_BYTES", 0)
    copied = run(backend, *jobs)
    for one, other, third in zip(together, alone, copied, strict=True):
        assert one.keys() == other.keys() == third.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), name
            assert torch.equal(tensor, third[name]), name


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cols", [1, 100, 4096, 12_289])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_length_in_place(backend, rows, cols, dtype):
    x, residual = torch.randn(2, rows, cols).to(dtype)
    weight, bias = torch.randn(2, cols)
    resident = backend.load_parameters(Op.LAYER_NORM, host(weight), host(bias))
    spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5, stats=True)
    tensors = {"x": host(x), "residual": host(residual)}
    (got,) = run(backend, NormJob(spec, tensors, layer(size=cols, backend_parameters=resident)))
    want = reference.layer_norm_forward(
        x, weight, bias, residual=residual, eps=1e-5, stats=True, precision=torch.float64
    )
    assert_right(got, want, moved=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 256])
def test_registered_memory_is_computed_where_it_is(backend, rows, dtype):
    descriptor, segment = make_segment(2**22, HostSegment)
    os.close(descriptor)
    memory = memoryview(segment)
    registration = backend.register_host_memory(memory)
    assert registration is not None
    nbytes = rows * 1024 * dtype.itemsize
    shape, recurrence = (rows, 1024), ReplaySlot()
    x = HostTensor(DTYPES[dtype], shape, memory[:nbytes])
    places = {"y": memory[2**21 : 2**21 + nbytes]}
    spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)
    # Often enough for its graph to be replayed.
    for _ in range(60):
        torch.frombuffer(x.data, dtype=dtype).normal_()
        job = NormJob(spec, {"x": x}, result_buffers=places, replay_slot=recurrence)
        recurrence.is_unbatched = backend.is_better_unbatched(job)
        execution = backend.run(Batch((job,))).wait()
        assert execution.has_filled_buffers
    (got,) = execution.results
    copied = NormJob(spec, {"x": host(back(x))})
    assert torch.equal(back(got["y"]), run(backend, copied)[0]["y"])
    del registration


def test_gradients_of_parameters_in_place(backend):
    weight, bias = torch.randn(2, 300)
    resident = backend.load_parameters(Op.LAYER_NORM, host(weight), host(bias))
    x, dy = torch.randn(2, 9, 300)
    spec = NormSpec(Op.LAYER_NORM, PassDirection.BACKWARD, 1e-5)
    job = NormJob(spec, {"x": host(x), "dy": host(dy)}, layer(size=300, backend_parameters=resident))
    (got,) = run(backend, job)
    assert_right(got, reference.layer_norm_backward(dy, x, weight, bias, eps=1e-5, precision=torch.float64), False)


def test_memory_from_before_the_start_is_not_computed_in_place(backend, monkeypatch):
    (job, _) = in_and_out(Op.RMS_NORM, PassDirection.FORWARD, None, torch.float32)
    (want,) = run(backend, job)
    monkeypatch.setattr(backend._buffer_allocator, "_slabs", SlabPool(max_idle_bytes=0))
    assert in_place.get_in_place_call(backend._buffer_allocator.prepare_buffers(Batch((job,))), fusednorm) is None
    (got,) = run(backend, job)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_batch_says_when_it_is_over(backend):
    (job, _) = in_and_out(Op.LAYER_NORM, PassDirection.FORWARD, None, torch.bfloat16)
    pending = backend.run(Batch((job,)))
    assert pending.poll(10)
    assert pending.wait().copy_out_s == 0
