"""Jobs that come again in the same memory: the same bits as those that come once, in their places."""

import weakref

import pytest
import torch
from normserve.backends.cpu.backend import CpuBackend
from normserve.engine.executor import fill_result_buffers
from normserve.jobs.job import Batch, BatchResult, NormJob, NormSpec, Op, PassDirection, ReplaySlot
from normserve.jobs.result_specs import infer_result_specs
from normserve.memory.tensors import HostTensor

from tests.garbage_collector import without_collector
from tests.service.backends.combinations import KINDS, MOST_COMBINATIONS, combinations
from tests.service.jobs.fake_jobs import layer
from tests.service.memory.host_tensors import back, host

FORWARD = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)


class Memory(bytearray):
    """That can be watched."""


@pytest.fixture(scope="module")
def backend():
    before = torch.get_num_threads()
    made = CpuBackend(threads=1, warm_sizes=())
    made.start()
    yield made
    torch.set_num_threads(before)


def recurring(job: NormJob) -> NormJob:
    """The same in memory of its own, with places that are longer than need be."""
    tensors = {
        name: HostTensor(each.dtype, each.shape, memoryview(bytearray(each.data)))
        for name, each in job.tensors.items()
    }
    return placed(job.spec, tensors, job.layer)


def placed(spec, tensors, of_layer=None) -> NormJob:
    described = infer_result_specs(
        spec, {name: (each.dtype, each.shape) for name, each in tensors.items()}, of_layer
    )
    places = {
        name: memoryview(Memory(b"\7" * (4 * torch.Size(shape).numel() + 64)))
        for name, (_, shape) in described.items()
    }
    return NormJob(spec, tensors, of_layer, result_buffers=places, replay_slot=ReplaySlot())


def following(job: NormJob) -> NormJob:
    return NormJob(job.spec, job.tensors, job.layer, job.may_overwrite, job.result_buffers, job.replay_slot)


def ran(backend: CpuBackend, job: NormJob) -> BatchResult:
    batch = Batch((job,))
    value = fill_result_buffers(batch, backend.run(batch))
    assert isinstance(value, BatchResult)
    return value


def assert_same(backend: CpuBackend, job: NormJob) -> None:
    """A job in its places as one without any."""
    alone = ran(backend, NormJob(job.spec, recurring(job).tensors, job.layer))
    got = ran(backend, job)
    (want,), (outputs,) = alone.results, got.results
    assert outputs.keys() == want.keys()
    assert got.kernel_bytes == alone.kernel_bytes
    for name, tensor in want.items():
        assert job.result_buffers is not None
        found = outputs[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert bytes(found.data) == bytes(tensor.data), name
        assert bytes(job.result_buffers[name][: tensor.nbytes]) == bytes(tensor.data), name
        rest = bytes(job.result_buffers[name][tensor.nbytes :])
        assert rest == b"\7" * len(rest), name


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_each_computes_what_the_memory_holds_then(backend, kind, every):
    # Others of each kind.
    for combination in combinations(*kind, range(KINDS.index(kind) % every, MOST_COMBINATIONS, every)):
        first = recurring(combination.job)
        assert_same(backend, first)
        assert first.replay_slot.prepared is not None
        half = len(first.x.data) // 2 // 16 * 16
        turned = bytes(first.x.data[half:]) + bytes(first.x.data[:half])
        first.x.data[:] = turned
        assert_same(backend, following(first))


@pytest.mark.parametrize("rows", [1, 400])
def test_a_layers_parameters_are_used_and_its_gradients_placed(backend, rows):
    torch.manual_seed(2)
    weight, bias = torch.randn(1024), torch.randn(1024)
    resident = backend.load_parameters(Op.LAYER_NORM, host(weight), host(bias))
    of_layer = layer(size=1024, backend_parameters=resident)
    x, dy = torch.randn(rows, 1024), torch.randn(rows, 1024)
    job = placed(FORWARD, {"x": host(x)}, of_layer)
    assert_same(backend, job)
    assert_same(backend, following(job))
    y = back(HostTensor(job.x.dtype, job.x.shape, job.result_buffers["y"][: job.x.nbytes]))
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (1024,), weight, bias))
    backward = placed(
        NormSpec(Op.LAYER_NORM, PassDirection.BACKWARD, 1e-5), {"x": host(x), "dy": host(dy)}, of_layer
    )
    assert_same(backend, backward)
    assert_same(backend, following(backward))


@pytest.mark.parametrize("rows", [2, 700])
def test_x_is_written_over_where_that_is_its_place(backend, rows):
    torch.manual_seed(3)
    x = torch.randn(rows, 1024)
    memory = memoryview(bytearray(x.numpy().tobytes()))
    tensor = HostTensor(host(x).dtype, (rows, 1024), memory)
    job = NormJob(FORWARD, {"x": tensor}, None, True, {"y": memory}, ReplaySlot())
    ran(backend, job)
    want = torch.nn.functional.layer_norm(x, (1024,))
    torch.testing.assert_close(back(tensor), want)
    ran(backend, following(job))
    torch.testing.assert_close(back(tensor), torch.nn.functional.layer_norm(want, (1024,)))


def test_nothing_is_kept_of_what_is_empty_or_comes_in_company(backend):
    empty = placed(FORWARD, {"x": host(torch.empty(0, 8))})
    (outputs,) = ran(backend, empty).results
    assert outputs["y"].shape == (0, 8)
    assert empty.replay_slot.prepared is None
    jobs = [placed(FORWARD, {"x": host(torch.randn(2, 8))}) for _ in range(2)]
    batch = Batch(tuple(jobs))
    assert not backend.run(batch).has_filled_buffers
    assert jobs[0].replay_slot.prepared is None


def test_what_is_kept_goes_with_whoever_keeps_it(backend):
    job = placed(FORWARD, {"x": host(torch.randn(400, 1024))})
    watched = weakref.ref(job.result_buffers["y"].obj)
    with without_collector():
        ran(backend, job)
        ran(backend, following(job))
        del job
        assert watched() is None


def test_jobs_that_could_share_no_launch_are_computed_alone(backend):
    x, weight = host(torch.randn(2, 8)), host(torch.randn(8))
    backward = NormSpec(Op.LAYER_NORM, PassDirection.BACKWARD, 1e-5)
    for spec, tensors in ((FORWARD, {"x": x}), (backward, {"x": x, "dy": x})):
        assert not backend.is_better_unbatched(placed(spec, tensors))
        job = placed(spec, tensors | {"weight": weight})
        assert backend.is_better_unbatched(job) == (job.compute_batch_class() is None) == (spec is backward)
