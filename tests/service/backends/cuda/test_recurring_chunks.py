"""Large jobs that recur in shared host memory, with the CPU's kernels in place of a device's."""

import time
from dataclasses import replace

import pytest
import torch
from normserve.backends.cuda import client_memory_launches, graph_cache
from normserve.backends.cuda.client_memory_launches import ChunkExecutionContext, ClientMemoryLaunch
from normserve.backends.cuda.copied_launches import ChunkLimits, CopiedLaunch
from normserve.backends.cuda.pipeline import StreamPipeline
from normserve.backends.library_calls import ResidentParameters
from normserve.jobs.job import Batch, NormJob, QueueLane, ReplaySlot
from normserve.memory.tensors import DType, HostTensor

from tests.service.backends.cuda.no_device import HostStreams
from tests.service.backends.cuda.test_host import FORWARD, backend, graphs, library, slabs
from tests.service.jobs.fake_jobs import layer
from tests.service.memory.host_tensors import back, host

__all__ = ["backend", "graphs", "library", "slabs"]

pytestmark = pytest.mark.parametrize("slabs", ["copied"], indirect=True)

ROWS, COLS = 300, 32
NBYTES = 4 * ROWS * COLS


@pytest.fixture(autouse=True)
def spaces(backend, graphs, monkeypatch):
    """Two, as of a device, and jobs of some KiB are large."""
    monkeypatch.setattr(client_memory_launches, "REPLAYED", ChunkLimits(4096, 16))
    monkeypatch.setattr(client_memory_launches, "_MOST_CHUNKED_BYTES", 2**18)
    monkeypatch.setattr(graph_cache, "_CALLS_BEFORE_CAPTURE", 3)
    monkeypatch.setattr(client_memory_launches, "_MOST_HOST_BYTES", 0)
    monkeypatch.setattr(client_memory_launches, "is_registered", lambda memory: not memory.readonly)
    made = [ChunkExecutionContext(HostStreams(urgent=False), graphs, "cpu") for _ in range(2)]
    backend._chunk_workspaces = iter(2 * made)
    return made


def job_in(memory, recurrence, registered=None, **changes):
    x = HostTensor(DType.FLOAT32, (ROWS, COLS), memory[:NBYTES])
    torch.frombuffer(x.data, dtype=torch.float32).normal_()
    places = {
        name: memory[start * NBYTES : (start + 1) * NBYTES] for start, name in enumerate(("y", "mean", "rstd"), 1)
    }
    spec = replace(FORWARD, **changes)
    job = NormJob(spec, {"x": x}, registered, result_buffers=places, replay_slot=recurrence)
    if recurrence is not None:
        recurrence.is_unbatched = client_memory_launches.is_computed_in_client_memory(job)
    return job


@pytest.fixture
def memory():
    return memoryview(bytearray(4 * NBYTES))


def run(backend, *jobs):
    return backend.run(Batch(jobs, QueueLane.LARGE)).wait()


def assert_right(execution, job):
    (outputs,) = execution.results
    assert execution.has_filled_buffers
    x = back(job.x)
    torch.testing.assert_close(back(outputs["y"]), torch.nn.functional.layer_norm(x, (COLS,)))
    torch.testing.assert_close(back(outputs["mean"]), x.mean(1))
    for name, tensor in outputs.items():
        assert tensor.data.obj is job.result_buffers[name].obj


def test_each_job_is_computed_of_what_lies_there_then_and_captured_in_the_end(backend, memory, library, graphs):
    recurrence = ReplaySlot()
    for number in range(6):
        job = job_in(memory, recurrence)
        assert_right(run(backend, job), job)
        assert graphs.captured == (number >= 2)
    assert graphs.replayed == 3
    # In nine chunks.
    assert len(library.written) == 9 * 6
    assert isinstance(recurrence.prepared, ClientMemoryLaunch)
    assert backend.can_launch_without_waiting(Batch((job,), QueueLane.LARGE))
    replay = backend.get_captured_launch(recurrence)
    assert len(replay.part_events) == 9


def test_jobs_take_turns_with_the_memory_of_the_device(backend, memory):
    works = []
    for _ in range(3):
        recurrence = ReplaySlot()
        run(backend, job_in(memory, recurrence))
        works.append(recurrence.prepared)
    first, second, third = (each.pipeline for each in works)
    assert first is third
    assert first is not second


def test_parameters_of_layers_are_used(backend, memory):
    weight, bias = torch.randn(COLS), torch.randn(COLS)
    named = replace(layer(size=COLS), backend_parameters=ResidentParameters(weight, bias))
    job = job_in(memory, ReplaySlot(), named)
    (outputs,) = run(backend, job).results
    torch.testing.assert_close(
        back(outputs["y"]), torch.nn.functional.layer_norm(back(job.x), (COLS,), weight, bias)
    )


def test_stages_are_measured(backend, memory):
    began = time.perf_counter()
    execution = run(backend, job_in(memory, ReplaySlot()))
    elapsed_s = time.perf_counter() - began
    assert execution.copy_in_s > 0
    assert execution.kernel_s > 0
    assert execution.copy_in_s + execution.kernel_s + execution.copy_out_s <= elapsed_s


@pytest.mark.parametrize(
    "changes",
    [
        {"replay_slot": None},
        {"result_buffers": None},
        {"may_overwrite": True},
        {"tensors": {"x": host(torch.randn(ROWS, COLS))}, "result_buffers": {"y": memoryview(bytes(NBYTES))}},
    ],
    ids=["not to come again", "no place", "over x", "memory that is not registered"],
)
def test_what_is_computed_in_another_way(backend, memory, spaces, changes):
    job = job_in(memory, ReplaySlot(), stats=False)
    given = {
        name: getattr(job, name) for name in ("tensors", "result_buffers", "replay_slot", "may_overwrite")
    } | changes
    other = NormJob(
        job.spec, given["tensors"], None, given["may_overwrite"], given["result_buffers"], given["replay_slot"]
    )
    assert (
        client_memory_launches.try_prepare_client_memory_launch(
            backend._buffer_allocator.describe_job_buffers(other), None, None, None, iter(spaces)
        )
        is None
    )


def test_what_does_not_fit_is_computed_in_another_way(backend, memory, spaces, monkeypatch):
    monkeypatch.setattr(client_memory_launches, "_MOST_CHUNKED_BYTES", 2 * NBYTES)
    job = job_in(memory, ReplaySlot(), stats=False)
    assert (
        client_memory_launches.try_prepare_client_memory_launch(
            backend._buffer_allocator.describe_job_buffers(job), None, None, None, iter(spaces)
        )
        is None
    )


def test_without_memory_of_the_device_jobs_are_computed_in_another_way(backend, memory, library, monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    place = ChunkExecutionContext(HostStreams(urgent=False), None, "cpu")
    monkeypatch.setattr(torch, "empty", refuse)
    for _ in range(2):
        job = job_in(memory, ReplaySlot())
        assert (
            client_memory_launches.try_prepare_client_memory_launch(
                backend._buffer_allocator.describe_job_buffers(job), library, None, None, iter([place])
            )
            is None
        )


def test_the_thread_stays_on_the_stream_that_is_captured():
    used = []

    class Streams(HostStreams):
        def use(self, stream):
            used.append(stream)
            return super().use(stream)

    pipeline = StreamPipeline(Streams(urgent=False))
    pipeline.enqueue_for_capture([CopiedLaunch((), lambda: ())] * 2, pipeline.make_part_events(2))
    assert used[-1] is pipeline.compute_stream


def test_parameters_that_come_along_are_read_anew_each_time(backend, memory):
    recurrence = ReplaySlot()
    for _ in range(5):
        job = job_in(memory, recurrence, stats=False)
        weight = HostTensor(DType.FLOAT32, (COLS,), memory[3 * NBYTES : 3 * NBYTES + 4 * COLS])
        torch.frombuffer(weight.data, dtype=torch.float32).normal_()
        job = NormJob(job.spec, {"x": job.x, "weight": weight}, None, False, job.result_buffers, recurrence)
        (outputs,) = run(backend, job).results
        right = torch.nn.functional.layer_norm(back(job.x), (COLS,), back(weight))
        torch.testing.assert_close(back(outputs["y"]), right)
    assert recurrence.prepared.captured_graph is not None
