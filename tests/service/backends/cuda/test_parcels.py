"""One piece of memory for what is small, none for what is large."""

from collections.abc import Sequence

import pytest
import torch
from normserve.backends.cuda.parcels import collected, parcel_of, written
from normserve.jobs.job import Batch, NormJob, NormSpec, Op, Pass
from normserve.memory.host_tensors import DType, HostTensor
from normserve.memory.slabs import SlabPool

from tests.service.memory.host_tensors import DTYPES, host

SPEC = NormSpec(Op.LAYER_NORM, Pass.FORWARD, 1e-5)


@pytest.fixture
def slabs():
    return SlabPool(max_idle_bytes=0)


def batch_of(*jobs: dict[str, torch.Tensor]) -> Batch:
    return Batch(tuple(NormJob(SPEC, {name: host(tensor) for name, tensor in job.items()}) for job in jobs))


class Bringer:
    """Copies, as a device would, and counts."""

    def __init__(self) -> None:
        self.copies = 0

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        self.copies += len(parts)
        return torch.cat(tuple(parts))


@pytest.mark.parametrize("counts", [(1,), (1, 2, 5)])
def test_small_jobs_come_in_one_copy(slabs, counts):
    weight = torch.randn(7)
    jobs = [
        {"x": torch.randn(rows, 7).bfloat16(), "residual": torch.randn(rows, 7), "weight": weight}
        for rows in counts
    ]
    bring = Bringer()
    tensors = parcel_of(batch_of(*jobs), slabs).brought(bring)
    assert bring.copies == 1
    for name in ("x", "residual"):
        assert torch.equal(tensors[name], torch.cat([job[name] for job in jobs]))
        assert tensors[name].dtype == jobs[0][name].dtype
        # As kernels that load 16 bytes at once want it, wherever the buffer begins.
        assert tensors[name].storage_offset() * tensors[name].element_size() % 16 == 0
    assert torch.equal(tensors["weight"], weight)


def test_large_job_is_copied_from_where_it_lies(slabs):
    job = batch_of({"x": torch.randn(100, 1024), "weight": torch.randn(1024)})
    parcel = parcel_of(job, slabs)
    assert slabs.used_bytes == 0
    data = job.jobs[0].x.data
    assert parcel.buffers[0][0].data_ptr() == torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    bring = Bringer()
    assert parcel.brought(bring)["x"].shape == (100, 1024)
    assert bring.copies == 2


def test_large_jobs_that_share_a_launch_are_copied_from_where_they_lie(slabs):
    weight = torch.randn(1024)
    jobs = [{"x": torch.randn(rows, 1024), "weight": weight} for rows in (80, 90, 100)]
    batch = batch_of(*jobs)
    parcel = parcel_of(batch, slabs)
    assert slabs.used_bytes == 0
    bring = Bringer()
    tensors = parcel.brought(bring)
    # Of the parameters, which are the same, once.
    assert bring.copies == len(jobs) + 1
    assert torch.equal(tensors["x"], torch.cat([job["x"] for job in jobs]))
    assert torch.equal(tensors["weight"], weight)


def test_large_job_in_column_major_order_is_turned_round(slabs):
    x = torch.randn(300, 400)
    turned = HostTensor(DType.FLOAT32, (300, 400), host(x.t().contiguous()).data, fortran_order=True)
    batch = Batch((NormJob(SPEC, {"x": turned}),))
    assert torch.equal(parcel_of(batch, slabs).brought(Bringer())["x"], x)


def test_no_rows(slabs):
    parcel = parcel_of(batch_of({"x": torch.empty(0, 8)}), slabs)
    assert parcel.brought(Bringer())["x"].shape == (0, 8)


def test_outputs_are_collected_in_one_slab_that_comes_home_with_the_last_of_them(slabs):
    outputs = {"y": torch.randn(5, 3), "mean": torch.randn(5), "z": torch.empty(0, 3).bfloat16()}
    got = collected(outputs, slabs)
    for name, tensor in outputs.items():
        assert (got[name].dtype, got[name].shape) == (DTYPES[tensor.dtype], tuple(tensor.shape))
        assert got[name].data == host(tensor).data
    assert slabs.used_bytes > 0
    del got["y"], got["z"]
    assert slabs.used_bytes > 0
    got.clear()
    assert slabs.used_bytes == 0


def test_results_are_written_to_their_places_and_nothing_behind_them():
    outputs = {"y": torch.arange(6.0).view(2, 3), "rstd": torch.ones(2), "none": torch.empty(0, 3)}
    memory = memoryview(bytearray(b"\xff" * 128))
    places = {"y": memory[:40], "rstd": memory[48:64], "none": memory[64:]}
    results = written(outputs, places)
    for name, tensor in outputs.items():
        assert results[name].shape == tuple(tensor.shape)
        assert bytes(results[name].data) == tensor.numpy().tobytes()
        assert results[name].data.obj is memory.obj
    assert bytes(memory[24:48]) == b"\xff" * 24
