"""Batches that are copied, whole and in chunks of rows, with the CPU's kernels in place of a device's."""

from dataclasses import replace

import pytest
import torch
from fusednorm.cpu import batch_invariant
from normserve.backends.cuda import backend as triton
from normserve.backends.cuda import batch_buffers
from normserve.backends.cuda.copied_launches import ChunkLimits, try_divide_rows
from normserve.backends.library_calls import ResidentParameters
from normserve.backends.tensor_conversion import move_channels_first, restore_payload_order
from normserve.jobs.job import ROW_OPS, Batch, ChannelLayout, NormJob, NormSpec, Op, PassDirection, QueueLane
from normserve.memory.tensors import DType, HostTensor

from tests.service.backends.cuda.test_host import backend, graphs, library, slabs
from tests.service.jobs.fake_jobs import layer
from tests.service.memory.host_tensors import back, host

__all__ = ["backend", "graphs", "library", "slabs"]

pytestmark = pytest.mark.parametrize("slabs", ["copied"], indirect=True)

FORWARD = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5, stats=True)
SIZES = ChunkLimits(1024, 6)


@pytest.fixture(autouse=True)
def small_chunks(slabs, monkeypatch):
    monkeypatch.setattr(triton, "LAUNCHED", SIZES)
    monkeypatch.setattr(batch_buffers, "_PACKED_BYTES", 0)


@pytest.fixture
def run(backend):
    def run(job):
        (results,) = backend.run(Batch((job,), QueueLane.LARGE)).wait().results
        return results

    return run


def job_of(spec=FORWARD, registered=None, **tensors):
    return NormJob(spec, {name: host(tensor) for name, tensor in tensors.items()}, registered)


def equal(results, right, names):
    assert results.keys() == set(names)
    for name in names:
        assert torch.equal(back(results[name]), getattr(right, name)), name


@pytest.mark.parametrize(
    ("cols", "dtype", "unit"),
    [(8, torch.float32, 4), (7, torch.float16, 8), (7, torch.float32, 4)],
    ids=["statistics are narrow", "rows of 14 bytes", "rows of 28 bytes"],
)
@pytest.mark.parametrize("rows", [1000, 1003, 4099])
def test_chunks_cover_all_rows_and_begin_at_multiples_of_16_bytes(rows, cols, dtype, unit):
    chunks = try_divide_rows(job_of(x=torch.randn(rows, cols).to(dtype)), SIZES)
    assert len(chunks) == 6
    assert [row for chunk in chunks for row in chunk] == list(range(rows))
    assert all(chunk.start % unit == 0 for chunk in chunks)
    assert max(map(len, chunks)) - min(map(len, chunks)) < 2 * unit


def test_chunks_of_heads_hold_whole_tokens():
    chunks = try_divide_rows(job_of(x=torch.randn(101, 3, 16), weight=torch.randn(3, 16)), SIZES)
    assert chunks
    assert all(edge % 3 == 0 for chunk in chunks for edge in (chunk.start, chunk.stop))


def test_heads_in_chunks_have_the_bits_of_the_whole(run):
    x, weight = torch.randn(101, 3, 16), torch.randn(3, 16)
    equal(
        run(job_of(replace(FORWARD, stats=False), x=x, weight=weight)),
        batch_invariant.layer_norm_forward(x, weight, eps=1e-5),
        ("y",),
    )


def test_samples_of_rows_in_chunks_have_the_bits_of_the_whole(run):
    x, scale = torch.randn(40, 3, 16), torch.randn(40, 1, 16).half()
    job = job_of(x=x, scale=scale)
    chunks = try_divide_rows(job, SIZES)
    assert chunks
    assert all(edge % 3 == 0 for chunk in chunks for edge in (chunk.start, chunk.stop))
    right = batch_invariant.layer_norm_forward(x, scale=scale[:, 0], eps=1e-5, stats=True)
    equal(run(job), right, ("y", "mean", "rstd"))


def test_float8_of_samples_in_chunks_keeps_both_scales(run):
    x, scale = torch.randn(40, 3, 16), torch.randn(40, 16)
    spec = replace(FORWARD, stats=False, out_dtype=DType.FLOAT8_E4M3FN)
    assert try_divide_rows(job_of(spec, x=x, scale=scale), SIZES)
    right = batch_invariant.layer_norm_forward(x, scale=scale, eps=1e-5, out_dtype=torch.float8_e4m3fn)
    results = run(job_of(spec, x=x, scale=scale))
    assert torch.equal(back(results["scale"]), right.y_scale)
    assert torch.equal(back(results["y"]).view(torch.uint8), right.y.view(torch.uint8))


def test_few_large_samples_are_divided():
    spec = NormSpec(Op.GROUP_NORM, PassDirection.FORWARD, 1e-5, 4)
    assert list(map(len, try_divide_rows(job_of(spec, x=torch.randn(3, 8, 30, 30)), SIZES))) == [1, 1, 1]


@pytest.mark.parametrize(
    "job",
    [
        job_of(x=torch.randn(1, 4096)),
        job_of(x=torch.randn(255, 2)),
        job_of(NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5, dropout=0.5, seed=1), x=torch.randn(100, 64)),
        job_of(
            NormSpec(Op.LAYER_NORM, PassDirection.BACKWARD, 1e-5), x=torch.randn(100, 64), dy=torch.randn(100, 64)
        ),
        NormJob(
            FORWARD, {"x": HostTensor(DType.FLOAT32, (64, 64), memoryview(bytearray(2**14)), fortran_order=True)}
        ),
        job_of(x=torch.randn(0, 4096), weight=torch.randn(4096)),
        job_of(x=torch.randn(100, 64), scale=torch.randn(64)),
        job_of(x=torch.randn(100, 0, 64), scale=torch.randn(100, 64)),
    ],
    ids=[
        "one row",
        "little",
        "dropout",
        "backward",
        "column-major",
        "no rows",
        "one sample",
        "samples without rows",
    ],
)
def test_what_is_not_divided(job, run, library):
    assert not try_divide_rows(job, SIZES)
    run(job)
    assert len(library.written) <= 1


def test_jobs_that_share_a_launch_are_not_divided(backend, library):
    given = [torch.randn(rows, 64) for rows in (100, 60)]
    weight = torch.randn(64)
    shares = backend.run(Batch(tuple([job_of(x=x, weight=weight) for x in given]), QueueLane.LARGE)).wait().results
    assert len(library.written) == 1
    for x, outputs in zip(given, shares, strict=True):
        right = batch_invariant.layer_norm_forward(x, weight, eps=1e-5, stats=True)
        equal(outputs, right, ("y", "mean", "rstd"))


def test_a_job_behind_another_has_fewer_chunks_and_equal_bits(backend, library, monkeypatch):
    monkeypatch.setattr(triton, "LAUNCHED_BEHIND_OTHERS", ChunkLimits(16 * 1024, 6))
    small, large = torch.randn(128, 32), torch.randn(512, 32)

    def start(x):
        library.written.clear()
        return backend.run(Batch((job_of(x=x),), QueueLane.LARGE)), len(library.written)

    batches = [start(x) for x in (small, small, large)]
    assert [launches for _, launches in batches] == [6, 1, 4]
    for x, (batch, _) in zip((small, small, large), batches, strict=True):
        right = batch_invariant.layer_norm_forward(x, eps=1e-5, stats=True)
        equal(batch.wait().results[0], right, ("y", "mean", "rstd"))
    assert start(small)[1] == 6


def test_rows_in_chunks_have_the_bits_of_the_whole(run, library, slabs):
    x, weight, bias = torch.randn(301, 33), torch.randn(33), torch.randn(33)
    results = run(job_of(x=x, weight=weight, bias=bias))
    assert len(library.written) == 6
    equal(results, batch_invariant.layer_norm_forward(x, weight, bias, eps=1e-5, stats=True), ("y", "mean", "rstd"))
    assert slabs.used_bytes > 0
    del results
    assert slabs.used_bytes == 0


def test_results_of_chunks_go_to_their_places(run, slabs):
    x = torch.randn(301, 32).bfloat16()
    residual = torch.randn(301, 32)
    # Longer than the results: what is beyond stays as it is.
    places = {name: memoryview(bytearray(b"*" * 50_000)) for name in ("y", "residual_out", "mean", "rstd")}
    tensors = {"x": host(x), "residual": host(residual)}
    results = run(NormJob(FORWARD, tensors, result_buffers=places))
    right = batch_invariant.layer_norm_forward(x, eps=1e-5, stats=True, residual=residual)
    equal(results, right, places)
    assert slabs.used_bytes == 0
    for name, tensor in results.items():
        assert tensor.data.obj is places[name].obj
        assert set(places[name][len(tensor.data) :]) == {ord("*")}


@pytest.mark.parametrize("rows", [301, 10], ids=["in chunks", "whole"])
def test_the_engine_has_nothing_to_move_where_a_lone_job_has_places(backend, rows):
    tensors = {"x": host(torch.randn(rows, 32))}
    places = {name: memoryview(bytearray(50_000)) for name in ("y", "mean", "rstd")}
    placed = backend.run(Batch((NormJob(FORWARD, tensors, result_buffers=places),), QueueLane.LARGE)).wait()
    assert placed.has_filled_buffers
    elsewhere = backend.run(Batch((NormJob(FORWARD, tensors),), QueueLane.LARGE)).wait()
    assert not elsewhere.has_filled_buffers


def test_results_may_be_written_over_what_came(run):
    x = torch.randn(301, 32)
    memory = memoryview(bytearray(x.numpy().tobytes()))
    tensor = HostTensor(DType.FLOAT32, (301, 32), memory)
    spec = NormSpec(Op.RMS_NORM, PassDirection.FORWARD, 1e-5)
    results = run(NormJob(spec, {"x": tensor}, may_overwrite=True, result_buffers={"y": memory}))
    assert torch.equal(back(results["y"]), batch_invariant.rms_norm_forward(x, eps=1e-5).y)


@pytest.mark.parametrize("op", ROW_OPS)
def test_channels_of_samples_in_chunks(run, op):
    spec = NormSpec(op, PassDirection.FORWARD, 1e-5, layout=ChannelLayout.NCHW, stats=True)
    x, weight = torch.randn(25, 8, 5, 3), torch.randn(8)
    given = {"residual": torch.randn(x.shape), "scale": torch.randn(25, 8), "gate": torch.randn(25, 8)}
    job = job_of(spec, x=x, weight=weight, **given)
    assert try_divide_rows(job, SIZES)
    function = getattr(batch_invariant, f"{op.value}_forward")
    right = function(x, weight, **given, eps=1e-5, layout="nchw", stats=True)
    got = run(job)
    assert torch.equal(back(got["y"]), right.y)
    assert torch.equal(back(got["residual_out"]), right.residual_out)
    assert torch.equal(back(got["rstd"]), right.rstd)


@pytest.mark.parametrize("layout", ChannelLayout)
def test_samples_in_chunks_with_a_registered_layer(run, layout):
    resident = ResidentParameters(torch.randn(8), torch.randn(8))
    registered = layer(op=Op.GROUP_NORM, size=8, num_groups=2, backend_parameters=resident)
    spec = NormSpec(Op.GROUP_NORM, PassDirection.FORWARD, 1e-5, 2, layout)
    x = torch.randn(25, 8, 5, 3) if layout is ChannelLayout.NCHW else torch.randn(25, 5, 3, 8)
    job = job_of(spec, registered, x=x, scale=torch.randn(25, 8))
    assert try_divide_rows(job, SIZES)
    first = move_channels_first(spec, "x", x)
    scale = back(job.tensors["scale"])
    right = batch_invariant.group_norm_forward(first, 2, resident.weight, resident.bias, scale=scale, eps=1e-5).y
    assert torch.equal(back(run(job)["y"]), restore_payload_order(spec, "y", right))


def test_memory_that_is_read_is_held_until_the_chunks_are_over(backend, slabs):
    pending = backend.run(Batch((job_of(x=torch.randn(301, 32)),), QueueLane.LARGE))
    assert slabs.used_bytes > 0
    pending.wait()
    del pending
    assert slabs.used_bytes == 0
