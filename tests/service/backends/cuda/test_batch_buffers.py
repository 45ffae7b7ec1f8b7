"""Where batches and their results lie before they are launched."""

import pytest
import torch
from normserve.backends.cuda.batch_buffers import BatchBufferAllocator
from normserve.backends.cuda.copied_launches import make_whole_launch
from normserve.jobs.job import Batch, NormJob, NormSpec, Op, PassDirection
from normserve.memory.slabs import SlabPool
from normserve.memory.tensors import DeviceTensor, DType, HostTensor

from tests.service.backends.cuda.no_device import Writing
from tests.service.jobs.fake_jobs import layer
from tests.service.memory.host_tensors import back, host

SPEC = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)
STATISTICS = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5, stats=True)


@pytest.fixture
def slabs():
    return SlabPool(max_idle_bytes=0)


@pytest.fixture
def places(slabs):
    return BatchBufferAllocator(slabs)


def batch_of(*jobs: dict[str, torch.Tensor], spec: NormSpec = SPEC) -> Batch:
    return Batch(tuple(NormJob(spec, {name: host(tensor) for name, tensor in job.items()}) for job in jobs))


class Launch:
    """A batch that is copied to memory that stands in for the device's.

    Attributes:
        given: what the library's function got, by name; x under its own.
        copies: how many there were, in and out.
    """

    def __init__(self, taken) -> None:
        self.given: dict[str, torch.Tensor] = {}
        self.copies = [0, 0]
        part = make_whole_launch(taken, self, "cpu")
        self.copies[0] = len(part._input_copies)
        part.copy_in()
        part.compute()
        self.copies[1] = len(part._result_copies)
        part.copy_out()

    def layer_norm_forward(self, x, **options):
        self.given = {"x": x, **options}
        return Writing().layer_norm_forward(x, **options)


@pytest.mark.parametrize("counts", [(1,), (1, 2, 5)])
def test_small_jobs_are_copied_at_once_and_so_are_their_results(places, counts):
    weight = torch.randn(7)
    jobs = [
        {"x": torch.randn(rows, 7).bfloat16(), "residual": torch.randn(rows, 7), "weight": weight}
        for rows in counts
    ]
    taken = places.prepare_buffers(batch_of(*jobs, spec=STATISTICS))
    launch = Launch(taken)
    assert launch.copies == [1, 1]
    for name in ("x", "residual"):
        assert torch.equal(launch.given[name], torch.cat([job[name] for job in jobs]))
        assert launch.given[name].dtype == jobs[0][name].dtype
        # As kernels that load 16 bytes at once want it, wherever the buffer begins.
        assert launch.given[name].storage_offset() * launch.given[name].element_size() % 16 == 0
    assert torch.equal(launch.given["weight"], weight)
    results = taken.view_results()
    for name in ("y", "residual_out", "mean", "rstd"):
        assert torch.equal(back(results[name]), getattr(launch.given["out"], name)), name


def test_large_job_is_copied_from_where_it_lies(places, slabs):
    batch = batch_of({"x": torch.randn(100, 1024), "weight": torch.randn(1024)})
    taken = places.prepare_buffers(batch)
    assert not taken.is_packed
    launch = Launch(taken)
    assert launch.copies == [2, 1]
    assert torch.equal(launch.given["x"], back(batch.jobs[0].x))
    # In slabs there is memory for y alone.
    assert batch.nbytes <= slabs.used_bytes < 1.3 * batch.nbytes


def test_large_jobs_that_share_a_launch_are_copied_from_where_they_lie(places):
    weight = torch.randn(1024)
    jobs = [{"x": torch.randn(rows, 1024), "weight": weight} for rows in (80, 90, 100)]
    launch = Launch(places.prepare_buffers(batch_of(*jobs)))
    # Of the parameters, which are the same, once.
    assert launch.copies == [len(jobs) + 1, 1]
    assert torch.equal(launch.given["x"], torch.cat([job["x"] for job in jobs]))
    assert torch.equal(launch.given["weight"], weight)


def test_large_job_in_column_major_order_is_turned_round(places):
    x = torch.randn(300, 400)
    turned = HostTensor(DType.FLOAT32, (300, 400), host(x.t().contiguous()).data, fortran_order=True)
    launch = Launch(places.prepare_buffers(Batch((NormJob(SPEC, {"x": turned}),))))
    assert torch.equal(launch.given["x"], x)


def test_no_rows(places):
    taken = places.prepare_buffers(batch_of({"x": torch.empty(0, 8)}, spec=STATISTICS))
    launch = Launch(taken)
    assert not launch.given
    assert {name: tensor.shape for name, tensor in taken.view_results().items()} == {
        "y": (0, 8),
        "mean": (0,),
        "rstd": (0,),
    }


def test_gradients_of_parameters_of_no_rows_are_zero(places):
    spec = NormSpec(Op.LAYER_NORM, PassDirection.BACKWARD, 1e-5)
    given = {"x": torch.empty(0, 8), "dy": torch.empty(0, 8), "weight": torch.randn(8)}
    taken = places.prepare_buffers(batch_of(given, spec=spec))
    Launch(taken)
    assert back(taken.view_results()["dweight"]).tolist() == [0.0] * 8


def test_a_slab_returns_with_the_last_result_in_it(places, slabs):
    results = places.prepare_buffers(batch_of({"x": torch.randn(5, 3)}, spec=STATISTICS)).view_results()
    assert slabs.used_bytes > 0
    del results["y"], results["rstd"]
    assert slabs.used_bytes > 0
    results.clear()
    assert slabs.used_bytes == 0


def test_results_of_a_large_job_go_to_its_own_places_and_nothing_behind_them(places, slabs):
    x = torch.randn(100, 1024)
    memory = {name: memoryview(bytearray(b"\xff" * 500_000)) for name in ("y", "mean", "rstd")}
    job = NormJob(STATISTICS, {"x": host(x)}, result_buffers=memory)
    taken = places.prepare_buffers(Batch((job,)))
    assert slabs.used_bytes == 0
    launch = Launch(taken)
    for name, tensor in taken.view_results().items():
        assert tensor.data.obj is memory[name].obj
        assert torch.equal(back(tensor), getattr(launch.given["out"], name)), name
        assert set(memory[name][len(tensor.data) :]) == {255}


def test_gradients_have_the_dtype_of_the_layer_that_each_batch_names(places):
    spec = NormSpec(Op.LAYER_NORM, PassDirection.BACKWARD, 1e-5)
    given = {"x": host(torch.randn(2, 8)), "dy": host(torch.randn(2, 8))}
    for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT32):
        taken = places.prepare_buffers(Batch((NormJob(spec, given, layer(size=8, dtype=dtype)),)))
        assert taken.view_results()["dweight"].dtype is dtype


def test_results_of_a_job_on_the_device_lie_on_the_device(places, slabs):
    memory = memoryview(bytearray(2 * 24 * 4))
    x = DeviceTensor(DType.FLOAT32, (2, 3, 4), memory[:96])
    taken = places.describe_job_buffers(NormJob(SPEC, {"x": x}, result_buffers={"y": memory[96:]}))
    (share,) = taken.split_results()
    assert share["y"] == DeviceTensor(DType.FLOAT32, (2, 3, 4), memory[96:])
    assert isinstance(share["y"], DeviceTensor)
    assert slabs.used_bytes == 0


def test_without_memory_for_results_nothing_is_launched(places, slabs):
    def refuse(nbytes):
        raise MemoryError

    slabs.source = type(slabs.source)(refuse, 4, False, None)
    with pytest.raises(MemoryError):
        places.prepare_buffers(batch_of({"x": torch.randn(100, 1024)}))
