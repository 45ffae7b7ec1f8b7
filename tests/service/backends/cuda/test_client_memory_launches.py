"""Jobs that come again and again in shared host memory, with the CPU's kernels in place of a device's."""

import gc
import weakref
from dataclasses import replace
from math import prod

import pytest
import torch
from normserve.backends.cuda import client_memory_launches, graph_cache
from normserve.jobs.job import Batch, ChannelLayout, NormJob, QueueLane, ReplaySlot
from normserve.memory.tensors import DeviceTensor, DType, HostTensor

from tests.service.backends.cuda.no_device import Instant
from tests.service.backends.cuda.test_host import FORWARD, backend, graphs, library, slabs
from tests.service.memory.host_tensors import back

__all__ = ["backend", "graphs", "library", "slabs"]

SPEC = replace(FORWARD, stats=False)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The memory that kernels can access."""
    known: list[memoryview] = []
    monkeypatch.setattr(
        client_memory_launches, "is_registered", lambda memory: any(memory.obj is each.obj for each in known)
    )
    monkeypatch.setattr(
        client_memory_launches, "view_on_device", lambda memory: torch.frombuffer(memory, dtype=torch.uint8)
    )
    return known


@pytest.fixture
def memory(registered):
    made = memoryview(bytearray(2**22))
    registered.append(made)
    return made


def job_in(memory, recurrence, rows=3, start=0):
    nbytes = rows * 128 * 4
    x = HostTensor(DType.FLOAT32, (rows, 128), memory[start : start + nbytes])
    torch.frombuffer(x.data, dtype=torch.float32).normal_()
    place = memory[start + nbytes : start + 2 * nbytes + 100]
    job = NormJob(SPEC, {"x": x}, result_buffers={"y": place}, replay_slot=recurrence)
    if recurrence is not None:
        recurrence.is_unbatched = client_memory_launches.is_computed_in_place(job)
    return job


def run(backend, *jobs):
    return backend.run(Batch(jobs)).wait()


def assert_placed(execution, job):
    (outputs,) = execution.results
    assert execution.has_filled_buffers
    assert outputs["y"].data.obj is job.result_buffers["y"].obj
    right = torch.nn.functional.layer_norm(back(job.x), (128,))
    torch.testing.assert_close(back(outputs["y"]), right)


def test_a_job_is_computed_where_its_tensors_are_and_is_prepared_once(backend, slabs, library, memory):
    recurrence = ReplaySlot()
    first = job_in(memory, recurrence)
    assert not backend.can_launch_without_waiting(Batch((first,)))
    assert_placed(run(backend, first), first)
    prepared = recurrence.prepared
    assert isinstance(prepared, client_memory_launches.ClientMemoryLaunch)
    again = job_in(memory, recurrence)
    assert backend.can_launch_without_waiting(Batch((again,)))
    assert_placed(run(backend, again), again)
    assert recurrence.prepared is prepared
    # Into their place at once, without memory of the server's.
    at = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert library.written == [{at + 3 * 128 * 4}] * 2
    assert slabs.used_bytes == 0


@pytest.mark.parametrize("slabs", ["copied"], indirect=True)
def test_what_is_not_computed_there(backend, memory):
    other = memoryview(bytearray(2**16))
    jobs = {
        "in memory that kernels cannot access": job_in(other, ReplaySlot()),
        "large": job_in(memory, ReplaySlot(), rows=3000),
        "not to come again": job_in(memory, None),
        "without a place": NormJob(SPEC, {"x": job_in(memory, None).x}, replay_slot=ReplaySlot()),
    }
    for what, job in jobs.items():
        run(backend, job)
        assert job.replay_slot is None or job.replay_slot.prepared is None, what


@pytest.mark.parametrize("slabs", ["copied"], indirect=True)
@pytest.mark.parametrize("is_on_device", [False, True])
def test_the_kernel_does_not_write_over_what_it_reads(backend, memory, library, is_on_device):
    x = job_in(memory, None).x
    right = torch.nn.functional.layer_norm(back(x), (128,))
    if is_on_device:
        x = DeviceTensor(x.dtype, x.shape, x.data)
    recurrence = ReplaySlot()
    job = NormJob(SPEC, {"x": x}, None, may_overwrite=True, result_buffers={"y": x.data}, replay_slot=recurrence)
    recurrence.is_unbatched = backend.is_better_unbatched(job)
    assert recurrence.is_unbatched == is_on_device
    (outputs,) = run(backend, job).results
    assert library.written == []
    torch.testing.assert_close(back(outputs["y"]), right)


@pytest.mark.parametrize("slabs", ["copied"], indirect=True)
def test_jobs_that_share_a_launch_are_copied_even_if_they_came_alone_before(backend, memory):
    recurrences = ReplaySlot(), ReplaySlot()
    for number, each in enumerate(recurrences):
        run(backend, job_in(memory, each, start=number * 2**16))
    jobs = tuple(job_in(memory, each, start=number * 2**16) for number, each in enumerate(recurrences))
    assert not backend.can_launch_without_waiting(Batch(jobs, QueueLane.SMALL))
    execution = run(backend, *jobs)
    assert not execution.has_filled_buffers
    for job, outputs in zip(jobs, execution.results, strict=True):
        right = torch.nn.functional.layer_norm(back(job.x), (128,))
        torch.testing.assert_close(back(outputs["y"]), right)


@pytest.mark.parametrize("slabs", ["copied"], indirect=True)
def test_what_is_captured_can_be_replayed_by_others(backend, memory, graphs, monkeypatch):
    monkeypatch.setattr(graph_cache, "_CALLS_BEFORE_CAPTURE", 2)
    recurrence = ReplaySlot()
    assert backend.get_captured_launch(recurrence) is None
    run(backend, job_in(memory, recurrence))
    assert backend.get_captured_launch(recurrence) is None
    run(backend, job_in(memory, recurrence))
    [graph] = graphs.alive
    replay = backend.get_captured_launch(recurrence)
    assert (replay.graph, replay.stream) == (id(graph), Instant.cuda_stream)
    # It is kept, and so is the memory that it reads, for as long as somebody may launch it.
    kept = weakref.ref(recurrence.prepared)
    del recurrence, graph
    assert kept() is not None
    assert len(graphs.alive) == 1
    del replay
    gc.collect()
    assert kept() is None
    assert len(graphs.alive) == 0


@pytest.mark.parametrize("slabs", ["copied"], indirect=True)
def test_a_job_that_recurs_is_captured_once_and_replayed_from_then_on(backend, memory, graphs):
    calls = graph_cache._CALLS_BEFORE_CAPTURE
    recurrence = ReplaySlot()
    for number in range(1, calls + 6):
        job = job_in(memory, recurrence)
        assert_placed(run(backend, job), job)
        assert graphs.captured == (number >= calls)
        assert graphs.replayed == max(0, number - calls)


@pytest.mark.parametrize("slabs", ["copied"], indirect=True)
def test_a_capture_falls_into_no_jobs_time(backend, memory, graphs, monkeypatch):
    monkeypatch.setattr(graph_cache, "_CALLS_BEFORE_CAPTURE", 1)
    seen = []
    pipeline = backend._pipelines[QueueLane.SMALL]
    start_one, capture = pipeline.start_single_step, graphs.capture

    def noting_flight(*stages):
        seen.append("flight begins")
        flight = start_one(*stages)
        seen.append("flight is on its way")
        return flight

    def noting_capture(call):
        seen.append("capture")
        return capture(call)

    monkeypatch.setattr(pipeline, "start_single_step", noting_flight)
    monkeypatch.setattr(graphs, "capture", noting_capture)
    run(backend, job_in(memory, ReplaySlot()))
    assert seen == ["flight begins", "flight is on its way", "capture"]


@pytest.mark.parametrize("slabs", ["copied"], indirect=True)
def test_a_capture_that_fails_costs_no_response(backend, memory, graphs, monkeypatch, caplog):
    monkeypatch.setattr(graph_cache, "_CALLS_BEFORE_CAPTURE", 1)
    graphs.broken = lambda: torch.OutOfMemoryError("dry")
    recurrence = ReplaySlot()
    for _ in range(3):
        job = job_in(memory, recurrence)
        assert_placed(run(backend, job), job)
    [record] = caplog.records
    assert "dry" in record.getMessage()
    assert graphs.replayed == 0


def test_without_the_extension_nothing_is_replayed_by_others(backend):
    assert backend.make_replayer() is None


@pytest.mark.parametrize("slabs", ["copied"], indirect=True)
def test_what_is_computed_alone_shares_no_launch(backend, memory):
    there, elsewhere = job_in(memory, ReplaySlot()), job_in(memoryview(bytearray(2**16)), ReplaySlot())
    assert backend.is_better_unbatched(there)
    assert there.compute_batch_class() is None
    assert not backend.is_better_unbatched(elsewhere)
    assert elsewhere.compute_batch_class() is not None


@pytest.mark.parametrize(
    ("rows", "cols", "is_read"), [(1, 1024, True), (64, 1024, True), (200, 1024, False), (3900, 64, True)]
)
@pytest.mark.parametrize("slabs", ["copied"], indirect=True)
def test_parameters_are_read_where_they_are_unless_many_programs_would_read_long_ones(
    memory, slabs, rows, cols, is_read
):
    """Of 200 rows x and y have 1.6 MiB, and a weight of 4 KiB is read 132 times."""
    x = HostTensor(DType.FLOAT32, (rows, cols), memory[: 4 * rows * cols])
    weight = HostTensor(DType.FLOAT32, (cols,), memory[2**21 : 2**21 + 4 * cols])
    places = {"y": memory[2**21 + 2**12 :][: 4 * rows * cols]}
    job = NormJob(SPEC, {"x": x, "weight": weight}, result_buffers=places, replay_slot=ReplaySlot())
    assert client_memory_launches.is_computed_in_place(job) == is_read


@pytest.mark.parametrize(
    ("shape", "is_read"),
    [((1, 1024, 64), True), ((1, 1024, 200), False), ((4, 1024, 50), False), ((3, 64, 1300), True)],
)
@pytest.mark.parametrize("slabs", ["copied"], indirect=True)
def test_each_position_may_have_a_program_that_reads_the_parameters_of_its_channels(memory, slabs, shape, is_read):
    nbytes, of_channels = 4 * prod(shape), 4 * shape[1]
    tensors = {
        "x": HostTensor(DType.FLOAT32, shape, memory[:nbytes]),
        "scale": HostTensor(DType.FLOAT32, shape[:2], memory[2**21 :][: shape[0] * of_channels]),
    }
    spec = replace(SPEC, layout=ChannelLayout.NCHW)
    places = {"y": memory[2**21 + 2**16 :][:nbytes]}
    job = NormJob(spec, tensors, result_buffers=places, replay_slot=ReplaySlot())
    assert client_memory_launches.is_computed_in_place(job) == is_read
