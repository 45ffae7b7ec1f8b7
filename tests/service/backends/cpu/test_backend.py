"""The CPU backend: the same bits in any company, and results where they are asked for."""

from itertools import product
from types import SimpleNamespace

import fusednorm
import pytest
import torch
from fusednorm.cpu import batch_invariant, chunks
from normserve.backends.cpu import backend as cpu_backend
from normserve.backends.cpu.backend import CpuBackend
from normserve.codec.api_names import ACTIVATIONS
from normserve.errors import DeviceOutOfMemoryError, InvalidShapeError
from normserve.jobs.job import ROW_OPS, Batch, ChannelLayout, NormJob, NormSpec, Op, PassDirection
from normserve.memory.slabs import SlabPool
from normserve.memory.tensors import DType, HostTensor

from tests.sampling import mark_rest_slow
from tests.service.jobs.fake_jobs import layer
from tests.service.memory.host_tensors import DTYPES, back, host

OPS = ("layer_norm", "rms_norm", "group_norm")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


@pytest.fixture(scope="module", params=[1, 3])
def backend(request):
    before = torch.get_num_threads()
    made = CpuBackend(threads=request.param)
    made.start()
    yield made
    torch.set_num_threads(before)


def row_jobs(
    op: Op, direction: PassDirection, dtype: torch.dtype, cols: int, rows: list[int], activation: str = "gelu"
) -> list[NormJob]:
    spec = NormSpec(op, direction, eps=1e-5, activation=activation, stats=direction is PassDirection.FORWARD)
    names = ("x", "residual") if direction is PassDirection.FORWARD else ("x", "dy")
    return [NormJob(spec, {name: host(torch.randn(count, cols).to(dtype)) for name in names}) for count in rows]


def sample_jobs(
    direction: PassDirection,
    layout: ChannelLayout,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    activation: str,
    groups: int,
    op: Op = Op.GROUP_NORM,
) -> list[NormJob]:
    """One, two and three samples of [C, *spatial], each with a scale and a shift, and but for groups a gate."""
    spec = NormSpec(
        op,
        direction,
        1e-5,
        groups,
        layout,
        activation=activation,
        stats=direction is PassDirection.FORWARD,
    )
    names = ("x", "residual") if direction is PassDirection.FORWARD else ("x", "dy", "dresidual_out")
    sample = shape if layout is ChannelLayout.NCHW else (*shape[1:], shape[0])
    jobs = []
    for count in (1, 2, 3):
        tensors = {name: host(torch.randn(count, *sample).to(dtype)) for name in names}
        tensors["scale"] = host(torch.randn(count, shape[0]).half())
        tensors["shift"] = host(torch.randn(count, shape[0]))
        if op is not Op.GROUP_NORM:
            tensors["residual"] = host(torch.randn(count, *sample).to(dtype))
            tensors["gate"] = host(torch.randn(count, shape[0]).bfloat16())
        jobs.append(NormJob(spec, tensors))
    return jobs


def adaptive_row_jobs(op: Op, direction: PassDirection, tokens: int, cols: int) -> list[NormJob]:
    """One, two and three samples of rows, each with a scale and a shift."""
    spec = NormSpec(op, direction, eps=1e-5, activation="silu", stats=direction is PassDirection.FORWARD)
    names = ("x",) if direction is PassDirection.FORWARD else ("x", "dy")
    jobs = []
    for count in (1, 2, 3):
        tensors = {name: host(torch.randn(count, tokens, cols)) for name in names}
        tensors["scale"] = host(torch.randn(count, 1, cols).half())
        tensors["shift"] = host(torch.randn(count, 1, cols))
        jobs.append(NormJob(spec, tensors))
    return jobs


def assert_same_bits_alone(backend: CpuBackend, jobs: list[NormJob]) -> None:
    together = backend.run(Batch(tuple(jobs)))
    for job, outputs in zip(jobs, together.results, strict=True):
        (alone,) = backend.run(Batch((job,))).results
        assert alone.keys() == outputs.keys()
        for name in alone:
            assert alone[name].shape == outputs[name].shape
            assert bytes(alone[name].data) == bytes(outputs[name].data), name


@pytest.mark.parametrize("op", OPS)
def test_the_sum_has_the_residuals_dtype_but_xs_of_groups(backend, op):
    shape = (3, 8, 5) if op == "group_norm" else (3, 8)
    x, residual = torch.randn(shape).bfloat16(), torch.randn(shape).half()
    tensors = {"x": host(x), "residual": host(residual)}
    forward = NormSpec(Op(op), PassDirection.FORWARD, eps=1e-5, num_groups=2)
    (outputs,) = backend.run(Batch((NormJob(forward, tensors),))).results
    own = op != "group_norm"
    expected = (x.float() + residual.float()).to(torch.float16 if own else torch.bfloat16)
    assert torch.equal(back(outputs["residual_out"]), expected)
    backward = NormSpec(Op(op), PassDirection.BACKWARD, eps=1e-5, num_groups=2)
    (outputs,) = backend.run(Batch((NormJob(backward, tensors | {"dy": host(x)}),))).results
    assert outputs.keys() == ({"dx", "dresidual"} if own else {"dx"})
    assert back(outputs["dx"]).dtype == torch.bfloat16
    if own:
        torch.testing.assert_close(back(outputs["dresidual"]).bfloat16(), back(outputs["dx"]), rtol=1e-2, atol=1e-6)


class TestCompany:
    @pytest.mark.parametrize(
        ("dtype", "op", "direction", "cols"),
        mark_rest_slow(product(DTYPES, (Op.LAYER_NORM, Op.RMS_NORM), PassDirection, (1, 7, 1000, 70_000))),
    )
    def test_rows_have_the_same_bits_alone_and_together(self, backend, op, direction, dtype, cols):
        assert_same_bits_alone(backend, row_jobs(op, direction, dtype, cols, [1, 2, 5]))

    @pytest.mark.parametrize(
        ("shape", "direction", "dtype", "layout"),
        mark_rest_slow(
            product([(8, 40, 3), (8, 5), (4, 30_011), (1, 70_001), (1, 1)], PassDirection, DTYPES, ChannelLayout)
        ),
    )
    def test_samples_have_the_same_bits_alone_and_together(self, backend, shape, direction, dtype, layout):
        groups = min(4, shape[0])
        assert_same_bits_alone(backend, sample_jobs(direction, layout, dtype, shape, "silu", groups))

    @pytest.mark.parametrize(
        ("op", "shape", "direction", "dtype"),
        mark_rest_slow(
            product(ROW_OPS, [(8, 40, 3), (8, 5), (4, 30_011), (70_001, 2), (1, 1)], PassDirection, DTYPES)
        ),
    )
    def test_channels_have_the_same_bits_alone_and_together(self, backend, op, shape, direction, dtype):
        jobs = sample_jobs(direction, ChannelLayout.NCHW, dtype, shape, "silu", 0, op)
        assert [job.rows for job in jobs] == [1, 2, 3]
        assert_same_bits_alone(backend, jobs)

    @pytest.mark.parametrize(
        ("direction", "activation"), mark_rest_slow(product(PassDirection, ACTIVATIONS), together=1)
    )
    def test_no_activation_tells_where_an_element_lies(self, backend, direction, activation):
        for cols in (1, 37, 40_003):
            jobs = row_jobs(Op.LAYER_NORM, direction, torch.float32, cols, [1, 2, 5], activation)
            assert_same_bits_alone(backend, jobs)
        for shape in ((6, 5), (6, 40_003)):
            jobs = sample_jobs(direction, ChannelLayout.NCHW, torch.float32, shape, activation, 3)
            assert_same_bits_alone(backend, jobs)

    def test_each_sample_keeps_its_own_scale_and_shift(self, backend):
        jobs = sample_jobs(PassDirection.FORWARD, ChannelLayout.NHWC, torch.float32, (6, 2, 5), "none", 3)
        for job, outputs in zip(jobs, backend.run(Batch(tuple(jobs))).results, strict=True):
            given = {name: back(tensor) for name, tensor in job.tensors.items()}
            h = (given["x"] + given["residual"]).movedim(-1, 1)
            z = torch.nn.functional.group_norm(h, 3).movedim(1, -1)
            of_positions = (slice(None), None, None)
            right = z * (1 + given["scale"].float()[of_positions]) + given["shift"][of_positions]
            torch.testing.assert_close(back(outputs["y"]), right, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize(
        ("op", "direction", "tokens", "cols"),
        mark_rest_slow(
            product((Op.LAYER_NORM, Op.RMS_NORM), PassDirection, (1, 3, 700), (1, 37, 1000)),
        ),
    )
    def test_samples_of_rows_have_the_same_bits_alone_and_together(self, backend, op, direction, tokens, cols):
        assert_same_bits_alone(backend, adaptive_row_jobs(op, direction, tokens, cols))

    def test_samples_of_rows_keep_their_own_scale_and_shift(self, backend):
        jobs = adaptive_row_jobs(Op.LAYER_NORM, PassDirection.FORWARD, 3, 8)
        for job, outputs in zip(jobs, backend.run(Batch(tuple(jobs))).results, strict=True):
            given = {name: back(tensor).float() for name, tensor in job.tensors.items()}
            z = torch.nn.functional.layer_norm(given["x"], (8,))
            right = torch.nn.functional.silu(z * (1 + given["scale"]) + given["shift"])
            torch.testing.assert_close(back(outputs["y"]), right, atol=1e-5, rtol=1e-5)

    def test_samples_may_have_no_rows(self, backend):
        tensors = {name: host(torch.randn(3, 0, 8)) for name in ("x", "dy")} | {"scale": host(torch.randn(3, 1, 8))}
        spec = NormSpec(Op.LAYER_NORM, PassDirection.BACKWARD, eps=1e-5)
        (outputs,) = backend.run(Batch((NormJob(spec, tensors),))).results
        assert outputs["dx"].shape == (3, 0, 8)
        assert torch.equal(back(outputs["dscale"]), torch.zeros(3, 1, 8))

    def test_each_gets_its_own_bytes_counted(self, backend):
        jobs = row_jobs(Op.LAYER_NORM, PassDirection.FORWARD, torch.float32, 8, [1, 2])
        assert backend.run(Batch(tuple(jobs))).kernel_bytes == (4 * 32, 4 * 64)

    def test_scale_and_shift_are_counted_with_their_samples(self, backend):
        for direction, passes in ((PassDirection.FORWARD, 1), (PassDirection.BACKWARD, 2)):
            jobs = sample_jobs(direction, ChannelLayout.NCHW, torch.float32, (4, 3), "none", 2)
            counted = backend.run(Batch(tuple(jobs))).kernel_bytes
            of_samples = passes * 4 * (2 + 4)
            assert counted == tuple(count * (4 * 12 * 4 + of_samples) for count in (1, 2, 3))
            jobs = adaptive_row_jobs(Op.RMS_NORM, direction, 5, 8)
            counted = backend.run(Batch(tuple(jobs))).kernel_bytes
            of_samples = passes * 8 * (2 + 4)
            assert counted == tuple(count * ((1 + passes) * 5 * 8 * 4 + of_samples) for count in (1, 2, 3))


class TestBackend:
    def test_column_major_is_turned_round(self, backend):
        x = torch.randn(3, 5, 4)
        columns = HostTensor(DType.FLOAT32, (3, 5, 4), host(x.permute(2, 1, 0)).data, fortran_order=True)
        spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, eps=1e-5)
        (outputs,) = backend.run(Batch((NormJob(spec, {"x": columns}),))).results
        torch.testing.assert_close(back(outputs["y"]), torch.nn.functional.layer_norm(x, (4,)))

    def test_layers_parameters_are_a_copy(self, backend):
        sent = host(torch.full((4,), 2.0))
        resident = backend.load_parameters(Op.RMS_NORM, sent, None)
        sent.data[:] = bytes(16)
        x = torch.randn(3, 4)
        job = NormJob(
            NormSpec(Op.RMS_NORM, PassDirection.FORWARD, eps=1e-6),
            {"x": host(x)},
            layer(op=Op.RMS_NORM, backend_parameters=resident),
        )
        (outputs,) = backend.run(Batch((job,))).results
        expected = torch.nn.functional.rms_norm(x, (4,), torch.full((4,), 2.0), 1e-6)
        torch.testing.assert_close(back(outputs["y"]), expected)

    def test_times_are_told(self, backend, monkeypatch):
        times = iter([10, 11, 13, 16])
        monkeypatch.setattr(cpu_backend, "time", SimpleNamespace(perf_counter=lambda: next(times)))
        execution = backend.run(Batch(tuple(row_jobs(Op.LAYER_NORM, PassDirection.FORWARD, torch.float32, 8, [1]))))
        assert (execution.copy_in_s, execution.kernel_s, execution.copy_out_s) == (1, 2, 3)

    def test_device_is_told(self, backend):
        device = backend.start()
        assert (backend.name, device.kind) == ("torch", "cpu")
        assert device.copy_bandwidth > 1e8
        assert device.versions["torch"] == torch.__version__

    @pytest.mark.parametrize("stats", [False, True])
    def test_large_results_are_written_by_pieces_into_given_memory(self, stats, monkeypatch):
        x, memory = torch.randn(7, 24), torch.empty(7, 24)
        whole = batch_invariant.layer_norm_forward(x, activation="silu", stats=stats)
        monkeypatch.setattr("fusednorm.cpu.batch_invariant.row_norms.WHOLE_ELEMENTS", 100)
        monkeypatch.setattr(chunks, "PIECE_ELEMENTS", 48)
        written = batch_invariant.layer_norm_forward(
            x, activation="silu", stats=stats, memory_like=lambda _: memory
        )
        assert written.y.data_ptr() == memory.data_ptr()
        for got, want in zip(written, whole, strict=True):
            assert (got is None) == (want is None)
            assert got is None or torch.equal(got, want)

    @pytest.mark.parametrize(
        ("op", "dtype", "has_residual"),
        mark_rest_slow(product([Op.LAYER_NORM, Op.RMS_NORM], DTYPES, [False, True])),
    )
    def test_large_results_are_written_over_what_came_where_that_is_allowed(
        self, backend, op, dtype, has_residual, monkeypatch
    ):
        monkeypatch.setattr("fusednorm.cpu.batch_invariant.row_norms.WHOLE_ELEMENTS", 100)
        monkeypatch.setattr(chunks, "PIECE_ELEMENTS", 48)
        sent = torch.randn(7, 24).to(dtype)
        names = ("x", "residual") if has_residual else ("x",)
        results = {}
        for may_overwrite in (False, True):
            tensors = {name: host(sent) for name in names}
            job = NormJob(NormSpec(op, PassDirection.FORWARD, eps=1e-5), tensors, None, may_overwrite)
            (results[may_overwrite],) = backend.run(Batch((job,))).results
            y = results[may_overwrite]["y"]
            assert (bytes(tensors["x"].data) == bytes(y.data)) == may_overwrite
            assert torch.equal(back(tensors["x"]), sent) == (not may_overwrite)
        assert results[False].keys() == results[True].keys()
        for name, kept in results[False].items():
            assert bytes(kept.data) == bytes(results[True][name].data)

    @pytest.mark.parametrize("scratch_bytes", [0, 2**20])
    def test_many_rows_are_gathered_in_a_slab_that_goes_home(self, scratch_bytes, monkeypatch):
        monkeypatch.setattr("normserve.backends.cpu.backend._SCRATCH_BYTES", scratch_bytes)
        monkeypatch.setattr("fusednorm.cpu.batch_invariant.row_norms.WHOLE_ELEMENTS", 0)
        slabs = SlabPool(max_idle_bytes=0)
        jobs = row_jobs(Op.LAYER_NORM, PassDirection.FORWARD, torch.bfloat16, 8, [1, 2, 5])
        backend = CpuBackend(1, slabs)
        together = backend.run(Batch(tuple(jobs)))
        assert (slabs.used_bytes > 0) == (scratch_bytes == 0)
        for job, outputs in zip(jobs, together.results, strict=True):
            (alone,) = backend.run(Batch((job,))).results
            assert bytes(outputs["y"].data) == bytes(alone["y"].data)
        del together, outputs, alone
        assert slabs.used_bytes == 0

    def test_more_is_computed_where_it_came_in_when_there_is_one_core(self, monkeypatch):
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
        several = CpuBackend().max_inline_bytes
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
        assert 0 < several < CpuBackend().max_inline_bytes

    @pytest.mark.parametrize(
        ("error", "meaning"),
        [
            (MemoryError(), DeviceOutOfMemoryError),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory"), DeviceOutOfMemoryError),
            (fusednorm.KernelInputError("odd"), InvalidShapeError),
            (RuntimeError("anything else"), type(None)),
        ],
    )
    def test_errors_have_a_meaning(self, backend, error, meaning):
        assert type(backend.translate_error(error)) is meaning
