"""The CUDA backend against the oracle, and its rows alone and in company; needs a GPU."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import fusednorm
import pytest
import torch
from fusednorm import reference
from fusednorm.errors import KernelInputError
from fusednorm.host.background_build import ensure_extension_built
from fusednorm.launch import replay_cache
from normserve.errors import DeviceFailureError, DeviceOutOfMemoryError, InvalidShapeError
from normserve.jobs.job import (
    LAYER_OPS,
    ROW_OPS,
    Batch,
    ChannelLayout,
    NormJob,
    NormSpec,
    Op,
    PassDirection,
    QueueLane,
)
from normserve.memory.tensors import DType, HostTensor
from triton import knobs

from tests.service.backends.answers import assert_right
from tests.service.backends.cuda.on_gpu import backend, run
from tests.service.jobs.fake_jobs import layer
from tests.service.memory.host_tensors import DTYPES, back, host

__all__ = ["backend"]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


def test_its_calls_are_repeated_by_the_host_extension(backend):
    ensure_extension_built()
    # The first call of a kind is planned, which loads the extension.
    x = torch.randn(3, 1000)
    run(backend, NormJob(NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5), {"x": host(x)}))
    assert replay_cache.get_extension() is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", PassDirection)
@pytest.mark.parametrize(
    ("op", "layout"), [*product(ROW_OPS, (None, ChannelLayout.NCHW)), *product((Op.GROUP_NORM,), ChannelLayout)]
)
def test_every_operation(backend, op, direction, layout, dtype):
    moved = layout is ChannelLayout.NHWC
    shape = (2, 12, 10, 64) if moved else (2, 64, 12, 10) if layout else (37, 1536)
    size = 64 if layout else 1536
    groups = [8] if op is Op.GROUP_NORM else []
    names = ["x", "residual"] + (["dy", "dresidual_out"] if direction is PassDirection.BACKWARD else [])
    tensors = {name: torch.randn(shape).to(dtype) for name in names}
    tensors["weight"] = torch.randn(size)
    if op is not Op.RMS_NORM:
        tensors["bias"] = torch.randn(size)
    if layout is not None:
        tensors |= {"scale": torch.randn(2, size).to(dtype), "shift": torch.randn(2, size)}
        if op is not Op.GROUP_NORM:
            tensors["gate"] = torch.randn(2, size).to(dtype)
    forward = direction is PassDirection.FORWARD
    spec = NormSpec(op, direction, 1e-5, groups[0] if groups else 0, layout, activation="silu", stats=forward)
    (got,) = run(backend, NormJob(spec, {name: host(tensor) for name, tensor in tensors.items()}))

    def first(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.movedim(-1, 1) if moved and tensor.dim() > 2 else tensor

    options = {name: first(tensor) for name, tensor in tensors.items() if name not in ("x", "dy")}
    options |= {"eps": 1e-5, "activation": "silu", "precision": torch.float64}
    leading = [first(tensors[name]) for name in (("x",) if forward else ("dy", "x"))]
    if forward:
        options["stats"] = True
    if spec.is_over_channels:
        options["layout"] = "nchw"
    want = getattr(reference, f"{op.value}_{direction.value}")(*leading, *groups, **options)
    assert_right(got, want, moved)


@pytest.mark.parametrize("cols", [1, 100, 4096, 40_000])
def test_rows_have_the_same_bits_alone_and_together(backend, cols):
    spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5, stats=True)
    jobs = [NormJob(spec, {"x": host(torch.randn(rows, cols))}) for rows in (1, 2, 33)]
    together = run(backend, *jobs)
    for job, outputs in zip(jobs, together, strict=True):
        (alone,) = run(backend, job)
        for name in alone:
            assert torch.equal(alone[name], outputs[name]), name


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("cols", [100, 1152, 40_000])
def test_samples_of_rows_have_the_same_bits_alone_and_together(backend, cols, tokens):
    spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5, activation="silu", stats=True)
    jobs = []
    for samples in (1, 2, 5):
        tensors = {"x": host(torch.randn(samples, tokens, cols).bfloat16())}
        tensors |= {name: host(torch.randn(samples, cols)) for name in ("scale", "shift")}
        jobs.append(NormJob(spec, tensors))
    assert len({job.compute_batch_class() for job in jobs}) == 1
    for job, together in zip(jobs, run(backend, *jobs), strict=True):
        (alone,) = run(backend, job)
        assert all(torch.equal(tensor, alone[name]) for name, tensor in together.items())


@pytest.mark.parametrize(
    ("op", "layout"), [*product((Op.GROUP_NORM,), ChannelLayout), *product(ROW_OPS, (ChannelLayout.NCHW,))]
)
@pytest.mark.parametrize("direction", PassDirection)
@pytest.mark.parametrize("shape", [(320, 8, 8), (320, 64, 64), (128, 300, 300), (6, 31), (4, 1)])
def test_samples_have_the_same_bits_alone_and_together(backend, shape, direction, op, layout):
    forward = direction is PassDirection.FORWARD
    groups = 2 if op is Op.GROUP_NORM else 0
    spec = NormSpec(op, direction, 1e-5, groups, layout, activation="silu", stats=forward)
    sample = (*shape[1:], shape[0]) if layout is ChannelLayout.NHWC else shape
    jobs = []
    for samples in (1, 2, 5):
        names = ("x", "residual") if forward else ("x", "dy")
        tensors = {name: host(torch.randn(samples, *sample).bfloat16()) for name in names}
        if forward or op is Op.GROUP_NORM:
            # In backward over channels they are summed over positions, and run alone.
            of_samples = ("scale", "shift") if op is Op.GROUP_NORM else ("scale", "shift", "gate")
            tensors |= {name: host(torch.randn(samples, shape[0])) for name in of_samples}
        jobs.append(NormJob(spec, tensors))
    together = run(backend, *jobs)
    for job, outputs in zip(jobs, together, strict=True):
        (alone,) = run(backend, job)
        assert alone.keys() == outputs.keys()
        for name in alone:
            assert torch.equal(alone[name], outputs[name]), name


def test_threads_take_turns_on_a_lane(backend):
    """The event loop's thread and the owner's launch on the same stream, one after the other."""
    spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)

    def one_of(number: int) -> None:
        lane = QueueLane.LARGE if number % 5 == 0 else QueueLane.SMALL
        x = torch.randn(700 if lane is QueueLane.LARGE else 2, 1024)
        (outputs,) = backend.run(Batch((NormJob(spec, {"x": host(x)}),), lane)).wait().results
        torch.testing.assert_close(
            back(outputs["y"]), torch.nn.functional.layer_norm(x, (1024,)), rtol=0, atol=3e-5
        )

    with ThreadPoolExecutor(1) as other:
        for number in range(40):
            other.submit(one_of, number).result()
            one_of(number + 1)


def test_no_rows(backend):
    spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)
    job = NormJob(spec, {"x": host(torch.empty(0, 8))})
    assert backend.run(Batch((job,))).wait().results[0]["y"].shape == (0, 8)


def test_layers_parameters_stay_on_the_device(backend):
    weight = torch.randn(256)
    resident = backend.load_parameters(Op.RMS_NORM, host(weight), None)
    x = torch.randn(5, 256)
    registered = layer(op=Op.RMS_NORM, backend_parameters=resident)
    (got,) = run(backend, NormJob(NormSpec(Op.RMS_NORM, PassDirection.FORWARD, 1e-6), {"x": host(x)}, registered))
    torch.testing.assert_close(got["y"], torch.nn.functional.rms_norm(x, (256,), weight, 1e-6))


@pytest.mark.parametrize(("op", "bias"), [(Op.LAYER_NORM, torch.randn(1111)), (Op.RMS_NORM, None)])
def test_a_layers_rows_compile_nothing_once_it_is_loaded(op, bias, backend, monkeypatch):
    parameters = torch.randn(1111), bias
    resident = backend.load_parameters(op, *(None if p is None else host(p) for p in parameters))
    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **kernel: compiled.append(kernel["fn"].name))
    for rows in (1, 7, 500):
        x = {"x": host(torch.randn(rows, 1111))}
        run(
            backend,
            NormJob(NormSpec(op, PassDirection.FORWARD, 1e-6), x, layer(op=op, backend_parameters=resident)),
        )
    assert compiled == []


def test_out_of_memory_is_survived(backend):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert isinstance(backend.translate_error(caught.value), DeviceOutOfMemoryError)
    test_no_rows(backend)


def test_errors_have_a_meaning(backend):
    assert isinstance(backend.translate_error(KernelInputError("odd")), InvalidShapeError)
    dry = RuntimeError("CUDA error: out of memory")
    assert isinstance(backend.translate_error(dry), DeviceOutOfMemoryError)
    broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert isinstance(backend.translate_error(broken), DeviceFailureError)
    assert backend.translate_error(ValueError("anything else")) is None


def test_memory_is_told(backend):
    memory = backend.read_memory_bytes()
    assert memory["allocated"] <= memory["reserved"] <= memory["total"]


@pytest.mark.parametrize("direction", PassDirection)
@pytest.mark.parametrize("op", LAYER_OPS)
def test_a_compiled_classes_jobs_compile_nothing(op, direction, backend, monkeypatch):
    shape = (64, 7, 3) if op is Op.GROUP_NORM else (1377,)
    parameters = {"weight": torch.randn(shape[0] if op is Op.GROUP_NORM else shape[-1])}

    def asked(rows: int) -> NormJob:
        names = ("x", "dy") if direction is PassDirection.BACKWARD else ("x", "residual")
        tensors = {name: torch.randn(rows, *shape) for name in names} | parameters
        spec = NormSpec(op, direction, 1e-5, 8 if op is Op.GROUP_NORM else 0, activation="silu")
        return NormJob(spec, {name: host(tensor) for name, tensor in tensors.items()})

    backend.compile_and_load_kernels(asked(3))
    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **kernel: compiled.append(kernel["fn"].name))
    for rows in (1, 2, 100):
        run(backend, asked(rows))
    assert compiled == []


def test_batches_overlap_and_stay_apart(backend):
    """Several in flight at once, in both lanes, each with its own numbers."""
    spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)
    flights = []
    for number in range(12):
        x = torch.randn(8192 if number % 2 else 3, 1024)
        lane = QueueLane.LARGE if number % 2 else QueueLane.SMALL
        flights.append((x, backend.run(Batch((NormJob(spec, {"x": host(x)}),), lane))))
    for x, flight in flights:
        (outputs,) = flight.wait().results
        torch.testing.assert_close(
            back(outputs["y"]), torch.nn.functional.layer_norm(x, (1024,)), rtol=0, atol=3e-5
        )


def test_large_jobs_have_the_same_bits_alone_together_and_at_their_places(backend):
    spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5, stats=True)
    weight = host(torch.randn(1024))
    given = [host(torch.randn(rows, 1024)) for rows in (80, 90, 3000)]
    jobs = [NormJob(spec, {"x": x, "weight": weight}) for x in given]
    for job, together in zip(jobs, run(backend, *jobs), strict=True):
        places = {name: memoryview(bytearray(job.nbytes)) for name in ("y", "mean", "rstd")}
        placed = NormJob(spec, job.tensors, result_buffers=places)
        for alone in (run(backend, job)[0], run(backend, placed)[0]):
            assert all(torch.equal(tensor, alone[name]) for name, tensor in together.items())
        y = torch.frombuffer(places["y"], dtype=torch.float32, count=job.x.nbytes // 4)
        assert torch.equal(y.view(job.x.shape), together["y"])


def test_slabs_are_pinned_and_come_home(backend):
    slabs = backend._slabs
    spec = NormSpec(Op.RMS_NORM, PassDirection.FORWARD, 1e-5)
    slab = torch.frombuffer(slabs.borrow(2**22), dtype=torch.float32)
    assert slab.is_pinned()
    x = HostTensor(DType.FLOAT32, (1024, 1024), slab.view(torch.uint8).numpy().data)
    execution = backend.run(Batch((NormJob(spec, {"x": x}),), QueueLane.LARGE)).wait()
    assert torch.frombuffer(execution.results[0]["y"].data, dtype=torch.float32).is_pinned()
    del x, slab, execution
    assert slabs.used_bytes == 0


def test_small_batches_run_on_whatever_thread_they_come_from(backend):
    spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)
    given = [torch.randn(rows, 4096) for rows in (1, 3)]
    batch = Batch(tuple(NormJob(spec, {"x": host(x)}) for x in given))
    assert batch.nbytes <= backend.max_inline_bytes
    with ThreadPoolExecutor(1) as elsewhere:
        executions = [elsewhere.submit(lambda: backend.run(batch).wait()).result(), backend.run(batch).wait()]
    for execution in executions:
        assert min(execution.copy_in_s, execution.kernel_s) > 0
        for x, outputs in zip(given, execution.results, strict=True):
            want = torch.nn.functional.layer_norm(x, (4096,))
            torch.testing.assert_close(back(outputs["y"]), want, rtol=0, atol=3e-5)


@pytest.mark.parametrize("rows", [3, 3000])
@pytest.mark.parametrize("op", [Op.LAYER_NORM, Op.RMS_NORM])
def test_float8_has_the_bits_of_the_library_in_process(backend, op, rows):
    x, residual, weight = torch.randn(rows, 1536).bfloat16(), torch.randn(rows, 1536), torch.randn(1536)
    spec = NormSpec(op, PassDirection.FORWARD, 1e-5, out_dtype=DType.FLOAT8_E4M3FN, weight_offset=1.0)
    tensors = {"x": x, "residual": residual, "weight": weight}
    (got,) = run(backend, NormJob(spec, {name: host(tensor) for name, tensor in tensors.items()}))
    library = getattr(fusednorm, f"{op.value}_forward")
    options = {"eps": 1e-5, "out_dtype": torch.float8_e4m3fn, "weight_offset": 1.0}
    want = library(x.cuda(), weight.cuda(), residual=residual.cuda(), **options)
    assert got.keys() == {"y", "scale", "residual_out"}
    for name, tensor in got.items():
        right = (want.y_scale if name == "scale" else getattr(want, name)).cpu()
        assert tensor.dtype == right.dtype
        assert torch.equal(tensor.view(torch.uint8), right.view(torch.uint8)), name


def test_tokens_of_heads_have_the_same_bits_alone_and_together(backend):
    spec = NormSpec(Op.RMS_NORM, PassDirection.FORWARD, 1e-5, stats=True)
    weight = host(torch.randn(8, 128))
    jobs = [
        NormJob(spec, {"x": host(torch.randn(tokens, 8, 128).half()), "weight": weight}) for tokens in (1, 5, 40)
    ]
    assert len({job.compute_batch_class() for job in jobs}) == 1
    for job, together in zip(jobs, run(backend, *jobs), strict=True):
        (alone,) = run(backend, job)
        assert together["y"].shape == job.x.shape
        assert all(torch.equal(tensor, alone[name]) for name, tensor in together.items())
