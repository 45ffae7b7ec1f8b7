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
from fusednorm.devices.device import Gpu
from fusednorm.errors import KernelInputError
from fusednorm.tensors.devices import copy_bandwidth, describe_device
from fusednorm.warm.at_once import compile_at_once
from torch import Tensor

from normserve.backends.base import Depth
from normserve.backends.cuda.ahead import CompilingAhead, Model
from normserve.backends.cuda.copied import LAUNCHED, CopiedPart, chunk_parts, chunks_of, whole_part
from normserve.backends.cuda.cuda_streams import CudaStreams
from normserve.backends.cuda.graphs import CudaGraphs
from normserve.backends.cuda.in_flight import PendingBatch
from normserve.backends.cuda.in_place import call_in_place
from normserve.backends.cuda.pinned import pinned_memory, pinned_segments, registered
from normserve.backends.cuda.places import BatchPlaces, PlacesOfBatches
from normserve.backends.cuda.recurring import (
    PreparedLaunch,
    Workspace,
    is_computed_alone,
    prepare_launch,
)
from normserve.backends.cuda.replayer import build, driver
from normserve.backends.cuda.replays import Replays
from normserve.backends.cuda.streams import Pipeline
from normserve.backends.launch import ResidentParameters, call_of, destinations, launch, parameters_of
from normserve.backends.replayer import Replay, Replayer
from normserve.backends.tensors import (
    TORCH_DTYPES,
    channels_first,
    results_of,
    shape_of,
    view,
)
from normserve.backends.warmup import warm_up_batches
from normserve.errors import (
    DeviceFailureError,
    DeviceOutOfMemoryError,
    InvalidShapeError,
    NormserveError,
)
from normserve.jobs.device import DeviceInfo
from normserve.jobs.job import Batch, Lane, NormJob, Op, Recurrence
from normserve.memory.device_segments import Device, DeviceMemoryError
from normserve.memory.host_tensors import HostTensor
from normserve.memory.slabs import SlabPool, Source

log = logging.getLogger(__name__)

_DEVICE = "cuda"

# A very long row that comes alone is taken in another way than several.
_FEW_ROWS = (1, 2)

# Launches that are known to have run.
_MOST_KNOWN = 4096


class TritonBackend:
    """Brings batches to the device from pinned slabs, runs them, and brings the results back into such."""

    name = "triton"
    # Of large batches one on each wire and one that is computed.  Of small ones one: most run where they come from,
    # and would not again if there were always another under way.
    depth = Depth(4, {Lane.SMALL: 1, Lane.LARGE: 3})
    # Such a batch is on the device, and on the bus each way, for less time than two threads take to be told of it.
    inline_bytes = 1024 * 1024

    def __init__(
        self,
        slabs: SlabPool | None = None,
        warm_sizes: Collection[int] = (1024,),
        ahead: CompilingAhead | None = None,
    ) -> None:
        """Make it.

        Args:
            slabs: what bodies are received into; pinned from `start` on.
            warm_sizes: lengths of rows whose kernels `start` compiles.
            ahead: what compiles them beside, if anything does.
        """
        self._warm_sizes = warm_sizes
        self._ahead = ahead
        self.compiled: set[Hashable] = set()
        self.device_memory: Device | None = None
        self._slabs = slabs or SlabPool(max_idle_bytes=0)
        self._replays = Replays(CudaGraphs())
        self._workspaces: Iterator[Workspace] = iter(())
        self._new_replayer: Callable[..., Replayer] | None = None
        self._places = PlacesOfBatches(self._slabs)
        # What launches have run, each with the bytes of the slab that its results take.
        self._ran: dict[Hashable, int] = {}

    def start(self) -> DeviceInfo:
        # Samples of several clients share launches.
        fusednorm.require_batch_invariance(True)
        segments = self._slabs.source.segments
        # torch pins powers of two, whatever it is asked for.
        allocate, steps = (pinned_memory, 1) if segments is None else (pinned_segments(segments), 4)
        self._slabs.source = Source(allocate, steps=steps, is_slow=True, segments=segments)
        # Streams of their own for each lane: a small batch is not behind the copies of large ones.  Its own stages
        # take less time than streams take to wait for one another.
        self._pipelines = {
            Lane.SMALL: Pipeline(CudaStreams(urgent=True), apart=False),
            Lane.LARGE: Pipeline(CudaStreams(urgent=False)),
        }
        device = torch.device("cuda", torch.cuda.current_device())
        # Two, so that jobs of several clients overlap.
        workspaces = [Workspace(CudaStreams(urgent=False), CudaGraphs(), _DEVICE) for _ in range(2)]
        self._workspaces = itertools.cycle(workspaces)
        self.device_memory = _shareable(torch.cuda.current_device())
        # While other processes compile.
        self._new_replayer = build.load()
        bandwidth = copy_bandwidth(device)
        if self._ahead is not None:
            model = _model(device)
            self._ahead.finish(Model(model.arch, model.multiprocessors))
        for batch in warm_up_batches(self._warm_sizes):
            self.run(batch).wait()
            self.compiled.update(job.kernel_class() for job in batch.jobs)
        return DeviceInfo(
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

    def load(self, op: Op, weight: HostTensor, bias: HostTensor | None) -> ResidentParameters:
        # A layer says which rows will come; their dtype is most likely its own.
        has_heads = len(weight.shape) > 1
        if (op, bias is None) in ((Op.LAYER_NORM, False), (Op.RMS_NORM, True)) and not has_heads:
            warm_up = functools.partial(
                fusednorm.warmup, op.value, TORCH_DTYPES[weight.dtype], weight.shape[0], backward=False
            )
            compile_at_once(_model(torch.device(_DEVICE)), functools.partial(warm_up, device=torch.device("meta")))
            warm_up()
        return ResidentParameters(view(weight).cuda(), None if bias is None else view(bias).cuda())

    def launches_at_once(self, batch: Batch) -> bool:
        job = batch.jobs[0]
        is_prepared = job.recurrence is not None and job.recurrence.prepared is not None
        if job.is_on_device or (is_prepared and len(batch.jobs) == 1):
            return is_prepared
        nbytes = self._ran.get(_launch_class(batch))
        if nbytes is None or any(each.x.fortran_order for each in batch.jobs):
            return False
        return (job.places is not None and len(batch.jobs) == 1) or self._slabs.has_idle(nbytes)

    def run(self, batch: Batch) -> PendingBatch:
        """Launch a batch.

        It is computed where it lies, in its client's memory or packed in a slab, or copied, whole or in chunks.
        """
        job, is_alone = batch.jobs[0], len(batch.jobs) == 1
        if is_alone and (prepared := self._prepared_launch(job)) is not None:
            return prepared.start()
        began = time.perf_counter()
        places = self._places.take(batch)
        pipeline = self._pipelines[batch.lane]
        if (call := call_in_place(places, fusednorm)) is not None:
            parameters = {} if job.layer is None else parameters_of(job.layer.resident)
            packed_s = time.perf_counter() - began
            pending = pipeline.start_one(functools.partial(call, **parameters), places)
        else:
            chunks = chunks_of(job, LAUNCHED) if is_alone else ()
            packed_s = time.perf_counter() - began
            pending = self._start_copies(places, chunks, pipeline)
        # While the device computes it.
        shares = places.shares()
        pending.expect(shares, places.kernel_bytes(shares), packed_s=packed_s, are_placed=places.slab is None)
        if not places.is_packed:
            self._note(places)
        return pending

    def _prepared_launch(self, job: NormJob) -> PreparedLaunch | None:
        """The launch of a job in its client's memory; prepared once for those that follow."""
        recurrence = job.recurrence
        if recurrence is None:
            return self._prepare_launch(job) if job.is_on_device else None
        if not job.is_on_device and not recurrence.is_alone:
            return None
        if recurrence.prepared is None:
            recurrence.prepared = self._prepare_launch(job)
        prepared = recurrence.prepared
        assert prepared is None or isinstance(prepared, PreparedLaunch)
        return prepared

    def _prepare_launch(self, job: NormJob) -> PreparedLaunch | None:
        # On one stream whatever its size: graphs share memory, so that all of them follow one another.
        pipeline = self._pipelines[Lane.SMALL]
        return prepare_launch(self._places.own(job), fusednorm, pipeline, self._replays, self._workspaces)

    @torch.inference_mode()
    def _start_copies(self, places: BatchPlaces, chunks: Sequence[range], pipeline: Pipeline) -> PendingBatch:
        def make_parts() -> Sequence[CopiedPart]:
            if not chunks:
                return [whole_part(places, fusednorm, _DEVICE)]
            return chunk_parts(places.batch.jobs[0], chunks, places.results(), fusednorm, _tensors_like)

        return pipeline.start(make_parts, places)

    def _note(self, places: BatchPlaces) -> None:
        """A launch has run: nothing is compiled or loaded for its like."""
        key = _launch_class(places.batch)
        if key not in self._ran and not places.layout.is_empty:
            if len(self._ran) >= _MOST_KNOWN:
                self._ran.clear()
            self._ran[key] = places.layout.results_bytes

    def computes_alone(self, job: NormJob) -> bool:
        return is_computed_alone(job)

    @torch.inference_mode()
    def compile(self, job: NormJob) -> None:
        compile_at_once(_model(torch.device(_DEVICE)), lambda: _call_without_memory(job))
        parameters = {} if job.layer is None else parameters_of(job.layer.resident)
        for count in _FEW_ROWS:
            rows = count * max(1, job.heads)
            tensors = {
                name: torch.zeros(shape_of(job, name, rows), dtype=TORCH_DTYPES[tensor.dtype], device=_DEVICE)
                for name, tensor in job.tensors.items()
            }
            inputs = {name: channels_first(job.spec, name, tensor) for name, tensor in tensors.items()}
            launch(fusednorm, job.spec, {**inputs, **parameters})
        torch.cuda.current_stream().synchronize()

    def share(self, memory: memoryview) -> object:
        return registered(memory)

    def replay(self, recurrence: Recurrence) -> Replay | None:
        prepared = recurrence.prepared
        if not isinstance(prepared, PreparedLaunch) or (graph := prepared.graph) is None:
            return None
        marks = [(part.arrived.cuda_event, part.computed.cuda_event) for part in prepared.marks]
        stream = prepared.pipeline.compute_stream.cuda_stream
        return Replay(graph.raw_cuda_graph_exec(), stream, marks, (graph, prepared))

    def make_replayer(self) -> Replayer | None:
        if self._new_replayer is None:
            return None
        # Makes the device's context the thread's own.
        torch.cuda.set_device(torch.cuda.current_device())
        return self._new_replayer(**driver.addresses())

    def translate(self, error: Exception) -> NormserveError | None:
        if isinstance(error, KernelInputError):
            return InvalidShapeError(str(error))
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "CUDA error: out of memory" in str(error):
            torch.cuda.empty_cache()
            return DeviceOutOfMemoryError("the device has not enough memory for this request now")
        # After such an error the CUDA context answers every call with it: nothing but a new process helps.
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            return DeviceFailureError("the device has failed")
        return None

    def memory_bytes(self) -> Mapping[str, int]:
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "free": free,
            "total": total,
        }


def _shareable(ordinal: int) -> Device | None:
    """A device whose memory clients may have; None where that cannot be."""
    try:
        return Device(ordinal)
    except DeviceMemoryError as error:
        log.warning("clients on this host cannot have memory of the device: %s", error)
        return None


def _launch_class(batch: Batch) -> Hashable:
    """Launches that are equal in this run the same kernels in the same way."""
    return batch.jobs[0].kernel_class(), sum([job.rows for job in batch.jobs])


def _tensors_like(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: torch.empty_like(tensor, device=_DEVICE) for name, tensor in given.items()}


def _call_without_memory(job: NormJob) -> None:
    """Call what jobs of this one's class run, on tensors that have only shapes."""

    def absent(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    parameters = {} if job.layer is None else parameters_of(job.layer.resident)
    named = {name: absent(tensor.shape, tensor.dtype) for name, tensor in parameters.items()}
    for count in _FEW_ROWS:
        rows = count * max(1, job.heads)
        if not len(job.x.data):
            return
        results = results_of(job, rows)
        for name, tensor in job.tensors.items():
            given = absent(shape_of(job, name, rows), TORCH_DTYPES[tensor.dtype])
            named[name] = channels_first(job.spec, name, given)
        written = {name: absent(shape, TORCH_DTYPES[dtype]) for name, (dtype, shape) in results.items()}
        call_of(fusednorm, job.spec, named, {"out": destinations(job.spec, written)})()


def _model(device: torch.device) -> Gpu:
    return Gpu("", torch.cuda.get_device_capability(device), describe_device(device).multiprocessors)
