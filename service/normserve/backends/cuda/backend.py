"""A CUDA device, through the fusednorm kernels."""

import functools
import itertools
import logging
import platform
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence

import fusednorm
import torch
import triton
from fusednorm.devices.device_properties import GpuModel
from fusednorm.errors import KernelInputError
from fusednorm.launch.call_status import describe_repeated_calls
from fusednorm.tensors.devices import copy_bandwidth, describe_device
from fusednorm.warm.warm_calls import compile_in_parallel
from torch import Tensor

from normserve.backends.cuda.background_compile import BackgroundCompiler, CompileTarget
from normserve.backends.cuda.batch_buffers import BatchBufferAllocator, BatchBuffers
from normserve.backends.cuda.client_memory_launches import (
    ChunkExecutionContext,
    ClientMemoryLaunch,
    is_computed_in_client_memory,
    try_prepare_client_memory_launch,
)
from normserve.backends.cuda.copied_launches import (
    LAUNCHED,
    LAUNCHED_BEHIND_OTHERS,
    CopiedLaunch,
    make_whole_launch,
    try_divide_rows,
    try_make_chunk_launches,
)
from normserve.backends.cuda.cuda_streams import CudaStreams
from normserve.backends.cuda.graph_cache import CudaGraphCapturer, GraphCache
from normserve.backends.cuda.in_place import get_in_place_call
from normserve.backends.cuda.pinned import allocate_pinned, make_pinned_allocator, try_register_memory
from normserve.backends.cuda.pipeline import PendingCudaLaunch, StreamPipeline
from normserve.backends.cuda.replayer import build, driver
from normserve.backends.interface import LaunchDepth
from normserve.backends.library_calls import (
    ResidentParameters,
    bind_operation,
    collect_parameters,
    make_output_argument,
    run_operation,
)
from normserve.backends.replay_interface import CapturedLaunch, LaunchReplayer
from normserve.backends.tensor_conversion import (
    TORCH_DTYPES,
    compute_launch_shape,
    infer_batch_result_specs,
    move_channels_first,
    view_as_torch,
)
from normserve.backends.warm_up_batches import make_warm_up_batches
from normserve.errors import (
    DeviceFailureError,
    DeviceOutOfMemoryError,
    InvalidShapeError,
    NormserveError,
)
from normserve.jobs.device_description import DeviceDescription
from normserve.jobs.job import Batch, NormJob, Op, QueueLane, ReplaySlot
from normserve.memory.device_segments import DeviceMemoryError, ShareableDevice
from normserve.memory.slabs import SlabAllocator, SlabPool
from normserve.memory.tensors import HostTensor

log = logging.getLogger(__name__)

_DEVICE = "cuda"

# One very long row is computed by other kernels than several rows, and one sample by others than several.
_FEW_UNITS = (1, 2)

# Limit of the remembered launches.
_MAX_KNOWN_LAUNCHES = 4096


class TritonBackend:
    """The backend for a CUDA device: it runs batches on pinned host memory, on clients' memory, or on
    copies in device memory.
    """

    name = "triton"
    # Large batches: one in each direction of the bus, and one that is computed.  Small batches: one, as most run
    # inline, which is possible only while no other is in flight.
    launch_depth = LaunchDepth(4, {QueueLane.SMALL: 1, QueueLane.LARGE: 3})
    # Such a batch takes less time on the device, and on the bus in each direction, than a handover between threads.
    max_inline_bytes = 1024 * 1024

    def __init__(
        self,
        slabs: SlabPool | None = None,
        warm_sizes: Collection[int] = (1024,),
        ahead: BackgroundCompiler | None = None,
    ) -> None:
        """Store the settings.

        Args:
            slabs: into which bodies are received; pinned from `start` on.
            warm_sizes: lengths of rows whose kernels `start` compiles.
            ahead: compiles these kernels in the background; None if nothing does.
        """
        self._warm_sizes = warm_sizes
        self._background_compiler = ahead
        self.compiled_classes: set[Hashable] = set()
        self.shareable_device: ShareableDevice | None = None
        self._slabs = slabs or SlabPool(max_idle_bytes=0)
        self._graph_cache = GraphCache(CudaGraphCapturer())
        self._chunk_workspaces: Iterator[ChunkExecutionContext] = iter(())
        self._replayer_class: Callable[..., LaunchReplayer] | None = None
        self._buffer_allocator = BatchBufferAllocator(self._slabs)
        # The classes of launches that have run, each with the bytes of its results in the slab.
        self._known_launches: dict[Hashable, int] = {}

    def start(self) -> DeviceDescription:
        """Initialise the device, and compile the kernels of the warm-up.

        From now on slabs are allocated in pinned memory.  The streams are created, and the extension that replays
        launches is loaded.
        """
        # Samples of several clients share launches.
        fusednorm.require_batch_invariance(True)
        segments = self._slabs.source.allocate_segment
        # torch pins powers of two, whatever the requested size.
        allocate, steps = (allocate_pinned, 1) if segments is None else (make_pinned_allocator(segments), 4)
        self._slabs.source = SlabAllocator(
            allocate, sizes_per_doubling=steps, is_slow=True, allocate_segment=segments
        )
        # Streams of their own for each lane: a small batch is not behind the copies of large ones.  Its own stages
        # take less time than streams take to wait for one another.
        self._pipelines = {
            QueueLane.SMALL: StreamPipeline(CudaStreams(urgent=True), apart=False),
            QueueLane.LARGE: StreamPipeline(CudaStreams(urgent=False)),
        }
        device = torch.device("cuda", torch.cuda.current_device())
        # Two, so that jobs of several clients overlap.
        workspaces = [
            ChunkExecutionContext(CudaStreams(urgent=False), CudaGraphCapturer(), _DEVICE) for _ in range(2)
        ]
        self._chunk_workspaces = itertools.cycle(workspaces)
        self.shareable_device = _open_shareable_device(torch.cuda.current_device())
        # While other processes compile.
        self._replayer_class = build.load_extension()
        bandwidth = copy_bandwidth(device)
        if self._background_compiler is not None:
            model = _read_gpu(device)
            self._background_compiler.wait(CompileTarget(model.arch, model.multiprocessors))
        for batch in make_warm_up_batches(self._warm_sizes):
            self.run(batch).wait()
            self.compiled_classes.update(job.compute_kernel_class() for job in batch.jobs)
        log.info("%s", describe_repeated_calls())
        return DeviceDescription(
            name=torch.cuda.get_device_name(),
            kind="cuda",
            copy_bandwidth=bandwidth,
            versions={
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "triton": triton.__version__,
                "cuda": str(torch.version.cuda),
            },
        )

    def load_parameters(self, op: Op, weight: HostTensor, bias: HostTensor | None) -> ResidentParameters:
        """Copy a layer's parameters to the device; for a plain norm, first compile the kernels for its length
        and dtype.
        """
        # A layer defines the length of later rows; their dtype is most likely its own.
        has_heads = len(weight.shape) > 1
        if (op, bias is None) in ((Op.LAYER_NORM, False), (Op.RMS_NORM, True)) and not has_heads:
            warm_up = functools.partial(
                fusednorm.warmup, op.value, TORCH_DTYPES[weight.dtype], weight.shape[0], backward=False
            )
            compile_in_parallel(
                _read_gpu(torch.device(_DEVICE)), functools.partial(warm_up, device=torch.device("meta"))
            )
            warm_up()
        return ResidentParameters(
            view_as_torch(weight).cuda(), None if bias is None else view_as_torch(bias).cuda()
        )

    def can_launch_without_waiting(self, batch: Batch) -> bool:
        """Return whether `run` would need no compilation, no preparation and no new slab for this batch.

        That is so if the launch of its recurring job is prepared, or if an equal launch has run and a slab
        for its results is idle.
        """
        job = batch.jobs[0]
        is_prepared = job.replay_slot is not None and job.replay_slot.prepared is not None
        if job.is_on_device or (is_prepared and len(batch.jobs) == 1):
            return is_prepared
        nbytes = self._known_launches.get(_compute_launch_class(batch))
        if nbytes is None or any(each.x.fortran_order for each in batch.jobs):
            return False
        return (job.result_buffers is not None and len(batch.jobs) == 1) or self._slabs.has_idle(nbytes)

    def run(self, batch: Batch) -> PendingCudaLaunch:
        """Launch a batch, and return before the device has finished.

        It is computed in its client's memory, in place in a packed slab, or on copies, all at once or in
        chunks.
        """
        job, is_alone = batch.jobs[0], len(batch.jobs) == 1
        if is_alone and (prepared := self._get_or_prepare_client_memory_launch(job)) is not None:
            return prepared.start_and_capture_when_due()
        began = time.perf_counter()
        places = self._buffer_allocator.prepare_buffers(batch)
        pipeline = self._pipelines[batch.lane]
        if (call := get_in_place_call(places, fusednorm)) is not None:
            parameters = {} if job.layer is None else collect_parameters(job.layer.backend_parameters)
            packed_s = time.perf_counter() - began
            pending = pipeline.start_single_step(functools.partial(call, **parameters), places)
        else:
            limits = LAUNCHED_BEHIND_OTHERS if pipeline.is_copying else LAUNCHED
            chunks = try_divide_rows(job, limits) if is_alone else ()
            packed_s = time.perf_counter() - began
            pending = self._start_copied_launch(places, chunks, pipeline)
        # While the device computes it.
        shares = places.split_results()
        pending.set_results(
            shares, places.count_kernel_bytes(shares), packed_s=packed_s, are_placed=places.slab is None
        )
        if not places.is_packed:
            self._record_loaded_kernels(places)
        return pending

    def _get_or_prepare_client_memory_launch(self, job: NormJob) -> ClientMemoryLaunch | None:
        """Return the launch of a job that is computed in its client's memory; None for a job that must be copied.

        It is prepared once for all jobs that share a replay slot.
        """
        recurrence = job.replay_slot
        if recurrence is None:
            return self._try_prepare_client_memory_launch(job) if job.is_on_device else None
        if not job.is_on_device and not recurrence.is_unbatched:
            return None
        if recurrence.prepared is None:
            recurrence.prepared = self._try_prepare_client_memory_launch(job)
        prepared = recurrence.prepared
        assert prepared is None or isinstance(prepared, ClientMemoryLaunch)
        return prepared

    def _try_prepare_client_memory_launch(self, job: NormJob) -> ClientMemoryLaunch | None:
        """Prepare the launch of a job in its client's memory, always on the stream of small batches.

        None if the job cannot be computed there.
        """
        # On one stream whatever its size: graphs share memory, so that all of them follow one another.
        pipeline = self._pipelines[QueueLane.SMALL]
        return try_prepare_client_memory_launch(
            self._buffer_allocator.describe_job_buffers(job),
            fusednorm,
            pipeline,
            self._graph_cache,
            self._chunk_workspaces,
        )

    @torch.inference_mode()
    def _start_copied_launch(
        self, places: BatchBuffers, chunks: Sequence[range], pipeline: StreamPipeline
    ) -> PendingCudaLaunch:
        """Enqueue a batch's copies to the device, its computation, and the copies of its results to the host.

        The rows of each of the `chunks` are one launch; without chunks, the batch is one launch.
        """

        def make_launches() -> Sequence[CopiedLaunch]:
            if not chunks:
                return [make_whole_launch(places, fusednorm, _DEVICE)]
            return try_make_chunk_launches(
                places.batch.jobs[0], chunks, places.view_results(), fusednorm, _make_device_tensors_like
            )

        return pipeline.start_launches(make_launches, places)

    def _record_loaded_kernels(self, places: BatchBuffers) -> None:
        """Record that the kernels of this launch are loaded, so that equal launches need not compile or load them.

        Launches are equal if they run the same kernels on the same number of rows.
        """
        key = _compute_launch_class(places.batch)
        if key not in self._known_launches and not places.layout.is_empty:
            if len(self._known_launches) >= _MAX_KNOWN_LAUNCHES:
                self._known_launches.clear()
            self._known_launches[key] = places.layout.result_bytes

    def is_better_unbatched(self, job: NormJob) -> bool:
        return is_computed_in_client_memory(job)

    @torch.inference_mode()
    def compile_and_load_kernels(self, job: NormJob) -> None:
        """Compile the kernels of the job's class in several threads, then load them by running them on zeros.

        The zeros have no more rows than the job: device memory may suffice for no more.
        """
        compile_in_parallel(_read_gpu(torch.device(_DEVICE)), lambda: _call_on_meta_tensors(job))
        for rows in _list_few_rows(job):
            if rows <= job.rows:
                _run_on_zeros(job, rows)
        torch.cuda.current_stream().synchronize()

    def register_host_memory(self, memory: memoryview) -> object:
        return try_register_memory(memory)

    def get_captured_launch(self, replay_slot: ReplaySlot) -> CapturedLaunch | None:
        """Return the CUDA graph captured for the recurring jobs of a replay slot; None before the capture."""
        prepared = replay_slot.prepared
        if not isinstance(prepared, ClientMemoryLaunch) or (graph := prepared.captured_graph) is None:
            return None
        marks = [(part.arrived.cuda_event, part.computed.cuda_event) for part in prepared.part_events]
        stream = prepared.pipeline.compute_stream.cuda_stream
        return CapturedLaunch(graph.raw_cuda_graph_exec(), stream, marks, (graph, prepared))

    def make_replayer(self) -> LaunchReplayer | None:
        """Make a replayer for the calling thread; a replayer is C code that answers repeated requests.  Return None
        if the C extension could not be loaded.
        """
        if self._replayer_class is None:
            return None
        # Makes the device's context the thread's own.
        torch.cuda.set_device(torch.cuda.current_device())
        return self._replayer_class(**driver.find_function_addresses())

    def translate_error(self, error: Exception) -> NormserveError | None:
        """Translate an error of the inputs or of CUDA; None for any other exception.

        If memory is exhausted, also free the memory that torch caches.
        """
        if isinstance(error, KernelInputError):
            return InvalidShapeError(str(error))
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "CUDA error: out of memory" in str(error):
            torch.cuda.empty_cache()
            return DeviceOutOfMemoryError("the device has not enough memory for this request now")
        # After such an error the CUDA context answers every call with it: nothing but a new process helps.
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            return DeviceFailureError("the device has failed")
        return None

    def read_memory_bytes(self) -> Mapping[str, int]:
        """Return torch's allocated and reserved bytes of device memory, and the device's free and total bytes."""
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "free": free,
            "total": total,
        }


def _open_shareable_device(ordinal: int) -> ShareableDevice | None:
    """Return the CUDA device of that ordinal, for sharing its memory with clients; None, with a warning,
    if it cannot be shared.
    """
    try:
        return ShareableDevice(ordinal)
    except DeviceMemoryError as error:
        log.warning("clients on this host cannot have memory of the device: %s", error)
        return None


def _compute_launch_class(batch: Batch) -> Hashable:
    """Compute a key: launches with equal keys run the same kernels in the same way, with results of one size."""
    job = batch.jobs[0]
    return job.compute_kernel_class(), job.unit_rows, sum([each.rows for each in batch.jobs])


def _make_device_tensors_like(given: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.empty_like(tensor, device=_DEVICE) for tensor in given]


def _list_few_rows(job: NormJob) -> Sequence[int]:
    """List the numbers of rows, or of samples, for which the kernels of the job's class are compiled."""
    return [count * max(1, job.unit_rows) for count in _FEW_UNITS]


def _run_on_zeros(job: NormJob, rows: int) -> None:
    """Run the job's operation on zeros in device memory, which is free for others when this returns."""
    parameters = {} if job.layer is None else collect_parameters(job.layer.backend_parameters)
    inputs = {}
    for name, tensor in job.tensors.items():
        shape = compute_launch_shape(job, name, rows)
        zeros = torch.zeros(shape, dtype=TORCH_DTYPES[tensor.dtype], device=_DEVICE)
        inputs[name] = move_channels_first(job.spec, name, zeros)
    run_operation(fusednorm, job.spec, {**inputs, **parameters})


def _call_on_meta_tensors(job: NormJob) -> None:
    """Call the job's operation on tensors that have shapes but no data, so that its kernels are selected
    and compiled.
    """

    def make_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    parameters = {} if job.layer is None else collect_parameters(job.layer.backend_parameters)
    named = {name: make_meta(tensor.shape, tensor.dtype) for name, tensor in parameters.items()}
    for rows in _list_few_rows(job):
        results = infer_batch_result_specs(job, rows)
        for name, tensor in job.tensors.items():
            given = make_meta(compute_launch_shape(job, name, rows), TORCH_DTYPES[tensor.dtype])
            named[name] = move_channels_first(job.spec, name, given)
        written = {name: make_meta(shape, TORCH_DTYPES[dtype]) for name, (dtype, shape) in results.items()}
        bind_operation(fusednorm, job.spec, named, {"out": make_output_argument(job.spec, written)})()


def _read_gpu(device: torch.device) -> GpuModel:
    return GpuModel("", torch.cuda.get_device_capability(device), describe_device(device).multiprocessors)
