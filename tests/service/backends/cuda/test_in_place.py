"""Which batches are computed where they lie, and what both sides see of them there."""

from dataclasses import replace

import pytest
import torch
from normserve.backends.cuda.batch_buffers import BatchBufferAllocator
from normserve.backends.cuda.in_place import MOST_BYTES, get_in_place_call
from normserve.backends.cuda.pinned import attach_device_view
from normserve.backends.tensor_conversion import infer_batch_result_specs
from normserve.jobs.job import Batch, ChannelLayout, NormJob, NormSpec, Op, PassDirection
from normserve.memory.slabs import PLAIN, SlabPool
from normserve.memory.tensors import DType

from tests.service.jobs.fake_jobs import layer
from tests.service.memory.host_tensors import host

FORWARD = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)


@pytest.fixture
def slabs():
    """Slabs that the device, too, sees as the host's memory."""

    def allocate(nbytes):
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return attach_device_view(memory, memory)

    pool = SlabPool(max_idle_bytes=2**20)
    pool.source = replace(PLAIN, allocate=allocate)
    return pool


class Library:
    """Gives back what it is called with."""

    def layer_norm_forward(self, x, **options):
        return {"x": x, **options}

    def group_norm_forward(self, x, num_groups, **options):
        return {"x": x, **options}

    def layer_norm_backward(self, dy, x, **options):
        return {"dy": dy, "x": x, **options}


class Workplaces:
    """The places of batches, and the launches there."""

    def __init__(self, slabs):
        self._places = BatchBufferAllocator(slabs)
        self._library = Library()

    def prepare(self, batch):
        """A batch's places, and its launch there."""
        places = self._places.prepare_buffers(batch)
        return places, get_in_place_call(places, self._library)

    def call(self, batch):
        """Its launch there, None if it is copied; its memory is given back."""
        return self.prepare(batch)[1]


@pytest.fixture
def workplaces(slabs):
    return Workplaces(slabs)


def batch_of(*jobs: dict[str, torch.Tensor], spec: NormSpec = FORWARD, of: object = None) -> Batch:
    return Batch(tuple(NormJob(spec, {name: host(tensor) for name, tensor in job.items()}, of) for job in jobs))


@pytest.mark.parametrize("counts", [(1,), (1, 2, 5)])
def test_device_sees_what_came_and_the_host_what_is_written(workplaces, slabs, counts):
    weight = torch.randn(7)
    jobs = [
        {"x": torch.randn(rows, 7).bfloat16(), "residual": torch.randn(rows, 7).bfloat16(), "weight": weight}
        for rows in counts
    ]
    places, call = workplaces.prepare(batch_of(*jobs))
    called = call()
    out = called["out"]
    for name in ("x", "residual"):
        assert torch.equal(called[name], torch.cat([job[name] for job in jobs]))
    assert torch.equal(called["weight"], weight)
    assert "bias" not in called
    for tensor in (called["x"], called["residual"], called["weight"], out.y, out.residual_out):
        # As kernels that load 16 bytes at once want it.
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0
    assert out.mean is out.rstd is None
    wanted = {name: torch.randn(sum(counts), 7).bfloat16() for name in ("y", "residual_out")}
    for name, tensor in wanted.items():
        getattr(out, name).copy_(tensor)
    shares = places.split_results()
    assert len(shares) == len(places.count_kernel_bytes(shares)) == len(counts)
    for name, tensor in wanted.items():
        for share, rows in zip(shares, tensor.split(counts), strict=True):
            assert share[name] == host(rows.clone())
    for name in ("x", "residual"):
        assert torch.equal(called[name], torch.cat([job[name] for job in jobs])), "written over"
    held = shares[0]["y"]
    del places, shares, share
    assert slabs.used_bytes > 0
    del held
    assert slabs.used_bytes == 0


def test_share_has_the_shape_that_came(workplaces):
    places, _ = workplaces.prepare(batch_of({"x": torch.randn(2, 3, 9)}, spec=replace(FORWARD, stats=True)))
    (share,) = places.split_results()
    assert {name: tensor.shape for name, tensor in share.items()} == {
        "y": (2, 3, 9),
        "mean": (2, 3),
        "rstd": (2, 3),
    }


def test_registered_parameters_are_the_callers(workplaces):
    weight = object()
    _, call = workplaces.prepare(batch_of({"x": torch.randn(2, 9)}, of=layer(size=9)))
    assert call(weight=weight)["weight"] is weight
    assert "weight" not in call()


def test_slab_that_comes_again_is_seen_as_before(workplaces):
    for _ in range(3):
        x = torch.randn(2, 9)
        places, call = workplaces.prepare(batch_of({"x": x}))
        called = call()
        assert torch.equal(called["x"], x)
        called["out"].y.fill_(1)
        (share,) = places.split_results()
        assert bytes(share["y"].data) == torch.ones(18).numpy().tobytes()
        del places, share


def test_options_are_the_jobs_own(workplaces):
    for eps in (1e-3, 1e-5, 1e-3):
        places, call = workplaces.prepare(batch_of({"x": torch.randn(2, 9)}, spec=replace(FORWARD, eps=eps)))
        assert call()["eps"] == eps
        del places


def test_more_kinds_than_a_slab_remembers(workplaces):
    for rows in range(1, 150):
        x = torch.randn(rows, 3)
        places, call = workplaces.prepare(batch_of({"x": x}))
        called = call()
        assert torch.equal(called["x"], x)
        assert called["out"].y.shape == (rows, 3)
        del places


def test_channels_last_is_seen_with_channels_first(workplaces):
    spec = NormSpec(Op.GROUP_NORM, PassDirection.FORWARD, 1e-5, 2, ChannelLayout.NHWC, stats=True)
    x = torch.randn(2, 5, 3, 8)
    places, call = workplaces.prepare(batch_of({"x": x}, spec=spec))
    called = call()
    assert torch.equal(called["x"], x.movedim(-1, 1))
    assert called["out"].y.stride() == called["x"].stride()
    (share,) = places.split_results()
    assert share["y"].shape == x.shape
    assert called["out"].mean.shape == share["rstd"].shape == (2, 2)


def test_gradients_of_a_registered_layer_have_its_dtype(workplaces):
    registered = layer(size=8, dtype=DType.BFLOAT16, has_bias=True)
    spec = NormSpec(Op.LAYER_NORM, PassDirection.BACKWARD, 1e-5)
    tensors = {"x": torch.randn(3, 8), "dy": torch.randn(3, 8)}
    _, call = workplaces.prepare(batch_of(tensors, spec=spec, of=registered))
    out = call()["out"]
    assert out.dweight.shape == out.dbias.shape == (8,)
    assert out.dweight.dtype == out.dbias.dtype == torch.bfloat16
    assert out.dresidual is None


@pytest.mark.parametrize(
    ("tensors", "spec"),
    [
        ({"x": torch.zeros(0, 8)}, FORWARD),
        ({"x": torch.zeros(65, 1024)}, FORWARD),
    ],
)
def test_what_is_large_or_empty_is_not_computed_in_place(workplaces, slabs, tensors, spec):
    assert workplaces.call(batch_of(tensors, spec=spec)) is None
    assert slabs.used_bytes == 0


@pytest.mark.parametrize(("jobs", "fits"), [(2, True), (3, False)])
def test_together_as_much_as_may_come_and_go(workplaces, slabs, jobs, fits):
    row = MOST_BYTES // (2 * 2 * 4)
    batch = batch_of(*[{"x": torch.zeros(1, row)}] * jobs)
    assert (workplaces.call(batch) is not None) == fits
    assert slabs.used_bytes == 0


def test_statistics_count_with_what_goes(workplaces):
    rows = MOST_BYTES // (2 * 2 * 4)
    batch = batch_of(*[{"x": torch.zeros(rows, 1)}] * 2, spec=replace(FORWARD, stats=True))
    assert workplaces.call(batch) is None


def test_memory_that_the_device_does_not_see_is_left_to_copies(workplaces, slabs):
    slabs.source = PLAIN
    assert workplaces.call(batch_of({"x": torch.zeros(3, 8)})) is None


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("stats", [False, True])
def test_results_of_a_forward_pass(op, stats):
    groups = 2 if op is Op.GROUP_NORM else 0
    spec = NormSpec(op, PassDirection.FORWARD, 1e-5, groups, out_dtype=DType.FLOAT16, stats=stats)
    (job,) = batch_of({"x": torch.zeros(3, 8)}, spec=spec).jobs
    results = infer_batch_result_specs(job, 5)
    assert results["y"] == (DType.FLOAT16, (5, 8))
    statistics = {name: results[name] for name in results if name != "y"}
    names = () if not stats else ("rstd",) if op is Op.RMS_NORM else ("mean", "rstd")
    assert statistics == dict.fromkeys(names, (DType.FLOAT32, (5, groups) if groups else (5,)))


def test_results_of_a_backward_pass_are_gradients_of_what_came():
    spec = NormSpec(Op.GROUP_NORM, PassDirection.BACKWARD, 1e-5, 2)
    tensors = {name: torch.zeros(3, 8, 5).bfloat16() for name in ("x", "dy", "residual")}
    tensors |= {"weight": torch.zeros(8), "scale": torch.zeros(3, 8), "shift": torch.zeros(3, 8).bfloat16()}
    (job,) = batch_of(tensors, spec=spec).jobs
    assert infer_batch_result_specs(job, 3) == {
        "dx": (DType.BFLOAT16, (3, 8, 5)),
        "dweight": (DType.FLOAT32, (8,)),
        "dscale": (DType.FLOAT32, (3, 8)),
        "dshift": (DType.BFLOAT16, (3, 8)),
    }
