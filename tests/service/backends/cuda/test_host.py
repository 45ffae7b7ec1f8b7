"""The CUDA backend's way through its stages, with the CPU's kernels in place of a device's and no real streams."""

import time
import weakref
from dataclasses import replace

import pytest
import torch
from fusednorm.cpu import batch_invariant
from fusednorm.devices.device_properties import H200
from normserve.backends.cuda import backend as triton
from normserve.backends.cuda.pinned import attach_device_view
from normserve.backends.tensor_conversion import move_channels_first, restore_payload_order
from normserve.errors import DeviceOutOfMemoryError
from normserve.jobs.job import ROW_OPS, Batch, ChannelLayout, NormJob, NormSpec, Op, PassDirection, QueueLane
from normserve.memory.slabs import PLAIN, SlabPool
from normserve.memory.tensors import DType, HostTensor

from tests.service.backends.cuda.no_device import HostStreams, Instant, Writing
from tests.service.backends.fake_graphs import FakeGraphs
from tests.service.jobs.fake_jobs import layer
from tests.service.memory.host_tensors import DTYPES, back


def memory_of_both_sides(nbytes):
    memory = torch.empty(nbytes, dtype=torch.uint8)
    return attach_device_view(memory, memory)


@pytest.fixture(params=["in place", "copied"])
def slabs(request):
    pool = SlabPool(max_idle_bytes=0)
    if request.param == "in place":
        pool.source = replace(PLAIN, allocate=memory_of_both_sides)
    return pool


@pytest.fixture
def library():
    return Writing()


@pytest.fixture
def graphs():
    return FakeGraphs()


@pytest.fixture
def backend(slabs, library, graphs, monkeypatch):
    monkeypatch.setattr(triton, "_DEVICE", "cpu")
    monkeypatch.setattr(triton, "CudaStreams", HostStreams)
    monkeypatch.setattr(triton, "CudaGraphCapturer", lambda: graphs)
    monkeypatch.setattr(triton, "fusednorm", library)
    made = triton.TritonBackend(slabs)
    made._pipelines = {lane: triton.StreamPipeline(HostStreams(urgent=False)) for lane in QueueLane}
    return made


def host(tensor: torch.Tensor, slabs: SlabPool) -> HostTensor:
    slab = slabs.borrow(tensor.nbytes)[: tensor.nbytes]
    slab[:] = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return HostTensor(DTYPES[tensor.dtype], tuple(tensor.shape), slab)


FORWARD = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5, stats=True)


def test_a_launch_that_ran_before_is_at_once_where_memory_for_its_results_is_idle(backend, slabs, monkeypatch):
    monkeypatch.setattr(slabs, "_max_idle_bytes", 2**30)

    def batch(rows, *, turned=False):
        tensor = host(torch.randn(rows, 1024), slabs)
        if turned:
            tensor = HostTensor(tensor.dtype, tensor.shape, tensor.data, fortran_order=True)
        return Batch((NormJob(FORWARD, {"x": tensor}),), QueueLane.LARGE)

    first = batch(1024)
    assert not backend.can_launch_without_waiting(first)
    execution = backend.run(first).wait()
    # What came of it holds the memory of its results.
    assert not backend.can_launch_without_waiting(first)
    del execution
    assert backend.can_launch_without_waiting(first)
    # Other numbers of rows may have other kernels, and what is turned round is copied on the host.
    assert not backend.can_launch_without_waiting(batch(1025))
    assert not backend.can_launch_without_waiting(batch(1024, turned=True))


def test_what_the_host_packs_is_never_launched_at_once(backend, slabs, monkeypatch):
    monkeypatch.setattr(slabs, "_max_idle_bytes", 2**30)
    batch = Batch((NormJob(FORWARD, {"x": host(torch.randn(3, 128), slabs)}),))
    backend.run(batch).wait()
    assert not backend.can_launch_without_waiting(batch)


@pytest.mark.parametrize(
    ("rows", "lane"), [((3,), QueueLane.SMALL), ((1, 2, 5), QueueLane.SMALL), ((1100,), QueueLane.LARGE)]
)
def test_each_job_gets_its_rows_and_all_slabs_come_home(backend, slabs, library, rows, lane):
    given = [torch.randn(count, 128).bfloat16() for count in rows]
    weight = torch.randn(128)
    jobs = tuple(NormJob(FORWARD, {"x": host(x, slabs), "weight": host(weight, slabs)}) for x in given)
    began = time.perf_counter()
    execution = backend.run(Batch(jobs, lane)).wait()
    elapsed_s = time.perf_counter() - began
    # The three results lie in one piece of memory, from where one copy takes them.
    assert [len(pieces) for pieces in library.written] == [1]
    assert len(execution.results) == len(execution.kernel_bytes) == len(rows)
    assert execution.kernel_s > 0
    assert execution.copy_in_s + execution.kernel_s + execution.copy_out_s <= elapsed_s
    for x, outputs in zip(given, execution.results, strict=True):
        right = batch_invariant.layer_norm_forward(x, weight, eps=1e-5, stats=True)
        for name in ("y", "mean", "rstd"):
            assert torch.equal(back(outputs[name]), getattr(right, name)), name
    assert slabs.used_bytes > 0
    del jobs, execution, outputs
    assert slabs.used_bytes == 0


@pytest.mark.parametrize("tokens", [3, 700])
def test_each_sample_of_rows_gets_its_scale(backend, slabs, tokens):
    given = [(torch.randn(count, tokens, 128), torch.randn(count, 1, 128).half()) for count in (1, 2, 5)]
    jobs = tuple(NormJob(FORWARD, {"x": host(x, slabs), "scale": host(scale, slabs)}) for x, scale in given)
    assert len({job.compute_batch_class() for job in jobs}) == 1
    for (x, scale), outputs in zip(given, backend.run(Batch(jobs)).wait().results, strict=True):
        right = batch_invariant.layer_norm_forward(x, scale=scale[:, 0], eps=1e-5, stats=True)
        for name in ("y", "mean", "rstd"):
            assert torch.equal(back(outputs[name]), getattr(right, name)), name


def test_scales_of_samples_and_of_float8_rows_have_one_name(backend, slabs):
    spec = NormSpec(Op.RMS_NORM, PassDirection.FORWARD, 1e-5, out_dtype=DType.FLOAT8_E4M3FN)
    x, scale = torch.randn(2, 3, 64), torch.randn(2, 64)
    job = NormJob(spec, {"x": host(x, slabs), "scale": host(scale, slabs)})
    (outputs,) = backend.run(Batch((job,))).wait().results
    right = batch_invariant.rms_norm_forward(x, scale=scale, eps=1e-5, out_dtype=torch.float8_e4m3fn)
    assert torch.equal(back(outputs["scale"]), right.y_scale)
    assert torch.equal(back(outputs["y"]).view(torch.uint8), right.y.view(torch.uint8))
    assert torch.equal(back(job.tensors["scale"]), scale)


@pytest.mark.parametrize("of", [(64,), (2, 1, 64), (2, 3, 64)], ids=str)
def test_gradients_of_samples_have_the_shapes_that_came(backend, slabs, of):
    tensors = {name: torch.randn(2, 3, 64) for name in ("x", "dy")} | {"shift": torch.randn(of)}
    spec = NormSpec(Op.RMS_NORM, PassDirection.BACKWARD, 1e-5)
    job = NormJob(spec, {name: host(tensor, slabs) for name, tensor in tensors.items()})
    (outputs,) = backend.run(Batch((job,))).wait().results
    axes = [axis for axis in range(2) if axis >= len(of) - 1 or of[axis] == 1]
    torch.testing.assert_close(back(outputs["dshift"]), tensors["dy"].sum(axes).view(of) if axes else tensors["dy"])


@pytest.mark.parametrize("lane", QueueLane)
def test_one_result_is_written_in_place_or_where_the_library_likes(backend, slabs, library, lane):
    home = host(torch.randn(3 if lane is QueueLane.SMALL else 1100, 128), slabs)
    spec = replace(FORWARD, stats=False)
    (outputs,) = backend.run(Batch((NormJob(spec, {"x": home}),), lane)).wait().results
    assert len(library.written) == (lane is QueueLane.SMALL and slabs.source is not PLAIN)
    right = torch.nn.functional.layer_norm(back(home), (128,))
    torch.testing.assert_close(back(outputs["y"]), right)


@pytest.mark.parametrize("layout", ChannelLayout)
def test_gradients_come_home_in_one_piece(backend, slabs, library, layout):
    shape = (20, 8, 6, 40) if layout is ChannelLayout.NCHW else (20, 6, 40, 8)
    given = {name: torch.randn(shape) for name in ("x", "dy", "residual")} | {"weight": torch.randn(8)}
    spec = NormSpec(Op.GROUP_NORM, PassDirection.BACKWARD, 1e-5, 2, layout)
    tensors = {name: host(tensor, slabs) for name, tensor in given.items()}
    (outputs,) = backend.run(Batch((NormJob(spec, tensors),), QueueLane.LARGE)).wait().results
    assert [len(pieces) for pieces in library.written] == [1]
    first = {name: move_channels_first(spec, name, tensor).requires_grad_() for name, tensor in given.items()}
    y = torch.nn.functional.group_norm(first["x"] + first["residual"], 2, first["weight"])
    dx, dweight = torch.autograd.grad(y, (first["x"], first["weight"]), first["dy"].detach())
    assert outputs.keys() == {"dx", "dweight"}
    torch.testing.assert_close(back(outputs["dx"]), restore_payload_order(spec, "dx", dx), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(back(outputs["dweight"]), dweight, rtol=1e-3, atol=1e-3)


def test_a_sum_of_another_type_is_written_as_it_goes(backend, slabs, library):
    tensors = {"x": host(torch.randn(3, 128).bfloat16(), slabs), "residual": host(torch.randn(3, 128), slabs)}
    (outputs,) = backend.run(Batch((NormJob(FORWARD, tensors),))).wait().results
    assert library.written
    assert outputs["residual_out"].dtype is DType.FLOAT32


def test_channels_last_and_a_registered_layer(backend, slabs):
    weight, bias = torch.randn(8), torch.randn(8)
    resident = triton.ResidentParameters(weight, bias)
    registered = layer(op=Op.GROUP_NORM, size=8, num_groups=2, backend_parameters=resident)
    spec = NormSpec(Op.GROUP_NORM, PassDirection.FORWARD, 1e-5, 2, ChannelLayout.NHWC)
    x = torch.randn(2, 5, 3, 8)
    (outputs,) = backend.run(Batch((NormJob(spec, {"x": host(x, slabs)}, registered),))).wait().results
    right = torch.nn.functional.group_norm(x.movedim(-1, 1), 2, weight, bias).movedim(1, -1)
    torch.testing.assert_close(back(outputs["y"]), right)


@pytest.mark.parametrize("slabs", ["in place"], indirect=True)
def test_equal_jobs_of_slabs_are_launched_each_time_and_never_captured(backend, slabs, library, graphs):
    spec = replace(FORWARD, stats=False)
    for _ in range(60):
        run = backend.run(Batch((NormJob(spec, {"x": host(torch.randn(3, 8), slabs)}),)))
        run.wait()
    assert len(library.written) == 60
    assert (graphs.captured, graphs.replayed) == (0, 0)


def test_failed_launch_leaves_no_slab(backend, slabs, library, monkeypatch):
    def dry(*arguments, **options):
        raise torch.OutOfMemoryError("dry")

    monkeypatch.setattr(library, "layer_norm_forward", dry, raising=False)
    jobs = (NormJob(FORWARD, {"x": host(torch.randn(3, 128), slabs)}),)
    # pytest.raises would keep the traceback, and with it the slabs.
    raised = False
    try:
        backend.run(Batch(jobs))
    except torch.OutOfMemoryError:
        raised = True
    assert raised
    del jobs
    assert slabs.used_bytes == 0


@pytest.mark.parametrize(
    ("op", "direction", "layout"),
    [(op, direction, None) for op in Op for direction in op.passes]
    + [(op, direction, ChannelLayout.NCHW) for op in ROW_OPS for direction in op.passes],
)
def test_a_class_is_compiled_by_running_it_on_few_rows(backend, slabs, op, direction, layout, monkeypatch):
    launched = []
    real = triton.run_operation

    def noting(library, spec, tensors):
        launched.append({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        return real(library, spec, tensors)

    monkeypatch.setattr(triton, "run_operation", noting)
    shape = (9, 8, 6) if layout or op is Op.GROUP_NORM else (9, 8)
    is_chain = op is Op.LAYER_NORM_CHAIN
    names = (
        ("x",)
        if is_chain
        else ("x", "residual", "dy")
        if direction is PassDirection.BACKWARD
        else ("x", "residual")
    )
    tensors = {name: host(torch.randn(shape), slabs) for name in names}
    tensors["weight.1" if is_chain else "weight"] = host(torch.randn(8), slabs)
    spec = NormSpec(op, direction, 1e-5, 2 if op is Op.GROUP_NORM else 0, layout)
    monkeypatch.setattr(torch.cuda, "current_stream", Instant)
    monkeypatch.setattr(triton, "_read_gpu", lambda device: H200)
    planned = []

    def note_ahead(gpu, call):
        assert gpu == H200
        assert not launched
        call()

    def noting_absent(library, spec, tensors, of_library):
        assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
        assert {tensor.device.type for tensor in of_library["out"] if tensor is not None} == {"meta"}
        planned.append({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        return lambda: None

    monkeypatch.setattr(triton, "compile_in_parallel", note_ahead)
    monkeypatch.setattr(triton, "bind_operation", noting_absent)
    backend.compile_and_load_kernels(NormJob(spec, tensors))
    assert planned == launched
    assert [each["x"][0] for each in launched] == [1, 2]
    assert {each["x"][1:] for each in launched} == {shape[1:]}
    assert all(each["weight.1" if is_chain else "weight"] == (8,) for each in launched)


@pytest.mark.parametrize(
    ("shape", "of_samples", "run"),
    [
        ((1, 64), None, [(1, 64)]),
        ((3, 64), None, [(1, 64), (2, 64)]),
        ((1, 5, 64), (1, 64), [(1, 5, 64)]),
        ((2, 5, 64), (2, 64), [(1, 5, 64), (2, 5, 64)]),
    ],
)
@pytest.mark.parametrize("slabs", ["copied"], indirect=True)
def test_compiling_takes_no_more_memory_than_the_job(backend, slabs, shape, of_samples, run, monkeypatch):
    tensors = {"x": host(torch.randn(shape), slabs)}
    if of_samples is not None:
        tensors["scale"] = host(torch.randn(of_samples), slabs)
    launched, alive, planned = [], weakref.WeakSet(), []

    def note_launch(library, spec, tensors):
        # What ran before is freed.
        assert set(alive) == set()
        alive.update(tensors.values())
        launched.append(tuple(tensors["x"].shape))

    def note_plan(library, spec, tensors, of_library):
        planned.append(len(tensors["x"]))
        return lambda: None

    monkeypatch.setattr(torch.cuda, "current_stream", Instant)
    monkeypatch.setattr(triton, "_read_gpu", lambda device: H200)
    monkeypatch.setattr(triton, "run_operation", note_launch)
    monkeypatch.setattr(triton, "bind_operation", note_plan)
    monkeypatch.setattr(triton, "compile_in_parallel", lambda gpu, call: call())
    backend.compile_and_load_kernels(NormJob(replace(FORWARD, stats=False), tensors))
    assert launched == run
    # The kernels of two are compiled, too.
    assert planned == [1, 2]


@pytest.mark.parametrize("slabs", ["copied"], indirect=True)
def test_out_of_memory_empties_the_cache_and_may_be_tried_again(backend, slabs, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    for error in (torch.OutOfMemoryError("none left"), RuntimeError("CUDA error: out of memory")):
        meaning = backend.translate_error(error)
        assert isinstance(meaning, DeviceOutOfMemoryError)
        assert meaning.retry_after_s > 0
    assert emptied == [True, True]
    assert backend.translate_error(ValueError("odd")) is None
    assert len(emptied) == 2
