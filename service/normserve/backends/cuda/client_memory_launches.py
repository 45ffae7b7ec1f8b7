"""Recurring jobs in their client's memory: prepared once, launched for each job, and captured as a graph after a
while.

In device memory, and for small jobs in registered host memory, the kernels read the tensors and write the results
directly.  Large jobs in registered host memory are copied in, computed and copied out in chunks.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from normserve.backends.cuda.batch_buffers import BatchBuffers, make_tensors_in_buffers
from normserve.backends.cuda.copied_launches import REPLAYED, try_divide_rows, try_make_chunk_launches
from normserve.backends.cuda.graph_cache import GraphCache, GraphCapturer, RepeatedCall
from normserve.backends.cuda.pinned import is_registered, view_on_device
from normserve.backends.cuda.pipeline import PartEvents, PendingCudaLaunch, StreamFactory, StreamPipeline
from normserve.backends.library_calls import bind_operation, collect_parameters, make_output_argument, run_operation
from normserve.backends.tensor_conversion import (
    TORCH_DTYPES,
    count_kernel_bytes,
    infer_batch_result_specs,
    move_channels_first,
    restore_payload_order,
)
from normserve.codec.api_names import OF_SAMPLES, is_parameter
from normserve.jobs.job import NormJob
from normserve.jobs.result_specs import compute_statistics_shape
from normserve.memory.tensors import DType, HostTensor

log = logging.getLogger(__name__)

# Limit of the host memory that kernels access: all tensors and results.
_MOST_HOST_BYTES = 2**21 + 2**16
# About as many programs run at the same time.
_PROGRAMS = 132

# Limit of the tensors and results of chunked jobs; larger jobs gain little.
_MOST_CHUNKED_BYTES = 160 * 2**20
_ALIGNMENT = 256


class ClientMemoryLaunch:
    """The launch of a recurring job on its client's memory: prepared once, and started for each repetition.

    It keeps the client's memory mapped.

    Attributes:
        results: the result tensors in the client's memory.
        kernel_bytes: the fewest bytes that the launch must move.
        pipeline: on whose compute stream it is always launched.
        part_events: of its copied parts; empty if nothing is copied.
    """

    def __init__(
        self,
        results: Mapping[str, HostTensor],
        kernel_bytes: int,
        pipeline: StreamPipeline,
        repeated: RepeatedCall,
        marks: Sequence[PartEvents] = (),
    ) -> None:
        self.results = results
        self.kernel_bytes = kernel_bytes
        self.pipeline = pipeline
        self.part_events = marks
        self._repeated_call = repeated

    @property
    def captured_graph(self) -> Any:
        """The graph that is replayed; None before the capture."""
        return self._repeated_call.graph

    def start_and_capture_when_due(self) -> PendingCudaLaunch:
        """Launch the job on the current content of its tensors; after a number of launches, also capture it as
        a graph.
        """
        pending = self.pipeline.start_single_step(self._repeated_call.run, self, self.part_events)
        # While the device computes it.
        pending.set_results((self.results,), (self.kernel_bytes,), are_placed=True)
        if self._repeated_call.is_capture_due:
            self.pipeline.run_on_compute_stream(self._repeated_call.capture)
        return pending


class ChunkExecutionContext:
    """The streams and the block of device memory for large jobs that are computed in chunks of rows.  The jobs use
    them one after another.
    """

    def __init__(self, streams: StreamFactory, graphs: GraphCapturer, device: str) -> None:
        """Make the streams; the memory is allocated at its first use.

        Args:
            graphs: for this context alone, as its graphs must be replayed one after another.
            device: as torch names it.
        """
        self.pipeline = StreamPipeline(streams)
        self.graph_cache = GraphCache(graphs)
        self._device = device
        self._memory: Tensor | None = None
        self._is_refused = False

    def try_make_tensors_like(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        """Make tensors of the same dtypes and shapes in the context's block of device memory.

        Other jobs use the same block.  None if it could not be allocated.
        """
        if self._memory is None and not self._is_refused:
            self.pipeline.run_on_compute_stream(self._try_allocate_once)
        if self._memory is None:
            return None
        found, start = [], 0
        for tensor in given:
            found.append(self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return found

    def _try_allocate_once(self) -> None:
        """Allocate the context's block of device memory; if that fails, log a warning and do not try again."""
        try:
            self._memory = torch.empty(_MOST_CHUNKED_BYTES, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            self._is_refused = True
            log.warning("large requests in shared host memory are not captured: %s", error)


def try_prepare_client_memory_launch(
    places: BatchBuffers,
    library: ModuleType,
    pipeline: StreamPipeline,
    graph_cache: GraphCache,
    chunk_contexts: Iterator[ChunkExecutionContext],
) -> ClientMemoryLaunch | None:
    """Prepare the launch of a job on its client's memory; None if the job cannot be computed there.

    That is so for a job of unsuitable size or memory, and if there is no device memory for its chunks.

    Args:
        places: the buffers of the single job.
        library: the kernels.
        pipeline, graph_cache: for jobs that are computed in place, and for their graphs.
        chunk_contexts: for jobs in chunks, in turn.
    """
    job = places.batch.jobs[0]
    is_near = is_computed_in_place(job)
    chunks = () if is_near else _try_divide_registered_rows(job)
    workspace = next(chunk_contexts, None) if chunks else None
    if not is_near and workspace is None:
        return None
    (share,) = places.split_results()
    nbytes = count_kernel_bytes(job, share)
    # Tensors that are made in inference mode can be used only there.
    with torch.inference_mode(False):
        if workspace is None:
            return ClientMemoryLaunch(
                share,
                nbytes,
                pipeline,
                RepeatedCall(_make_client_memory_call(places, library), job.spec, graph_cache),
            )
        parts = try_make_chunk_launches(
            job, chunks, places.view_results(), library, workspace.try_make_tensors_like
        )
        if not parts:
            return None
        marks = workspace.pipeline.make_part_events(len(parts))
        put = functools.partial(workspace.pipeline.enqueue_for_capture, parts, marks)
        repeated = RepeatedCall(put, job.spec, workspace.graph_cache)
        return ClientMemoryLaunch(share, nbytes, workspace.pipeline, repeated, marks)


def is_computed_in_client_memory(job: NormJob) -> bool:
    """Return whether recurring jobs like this one are computed in their client's memory."""
    return is_computed_in_place(job) or bool(_try_divide_registered_rows(job))


def is_computed_in_place(job: NormJob) -> bool:
    """Return whether kernels read and write the job's own memory directly, without copies, if it is alone
    in its launch.

    In host memory, these are small recurring jobs in registered memory: kernels read and write over the
    bus at the same time, while for larger tensors copies use the bus better.
    """
    if job.is_on_device:
        return True
    if (
        job.replay_slot is None
        or job.may_overwrite
        or not len(job.x.data)
        or (memory := _list_input_and_result_memory(job)) is None
    ):
        return False
    nbytes = sum(map(len, memory))
    # Each program reads the parameters for itself, and for rows and positions a sample's scale, shift and gate.
    read_bytes = [tensor.nbytes for name, tensor in job.tensors.items() if is_parameter(name)]
    spec, most_programs = job.spec, job.rows
    if spec.is_over_channels:
        most_programs = prod(compute_statistics_shape(spec, job.x.shape))
    if spec.is_over_channels or job.unit_rows:
        samples = job.rows // max(1, job.unit_rows)
        read_bytes += [tensor.nbytes // samples for name, tensor in job.tensors.items() if name in OF_SAMPLES]
    nbytes += min(most_programs, _PROGRAMS) * sum(read_bytes)
    return nbytes <= _MOST_HOST_BYTES and all(map(is_registered, memory))


def _try_divide_registered_rows(job: NormJob) -> Sequence[range]:
    """Divide the rows of a large recurring job in registered host memory into chunks; empty for any other job."""
    if job.is_on_device or job.replay_slot is None or job.may_overwrite:
        return ()
    chunks = try_divide_rows(job, REPLAYED)
    memory = _list_input_and_result_memory(job) if chunks else None
    if memory is None or sum(map(len, memory)) + _ALIGNMENT * len(memory) > _MOST_CHUNKED_BYTES:
        return ()
    return chunks if all(map(is_registered, memory)) else ()


def _list_input_and_result_memory(job: NormJob) -> Sequence[memoryview] | None:
    """List the host memory of a job's tensors and result buffers; None if the job has no result buffers."""
    if job.result_buffers is None:
        return None
    of_results = make_tensors_in_buffers(job.result_buffers, infer_batch_result_specs(job, job.rows))
    return [tensor.data for tensor in (*job.tensors.values(), *of_results.values())]


def _make_client_memory_call(places: BatchBuffers, library: ModuleType) -> Callable[[], object]:
    """Make a function that launches the job's kernels on its own memory, which is viewed as device tensors."""
    job, layout = places.batch.jobs[0], places.layout
    spec = layout.spec
    inputs = {
        name: move_channels_first(spec, name, _view_as_device_tensor(job.tensors[name].data, dtype, shape))
        for name, (dtype, shape) in layout.input_specs.items()
    }
    if job.layer is not None:
        inputs |= collect_parameters(job.layer.backend_parameters)
    there = {
        name: _view_as_device_tensor(each.data, each.dtype, each.shape)
        for name, each in places.view_results().items()
    }
    if not layout.is_empty and not job.may_overwrite:
        return bind_operation(library, spec, inputs, {"out": make_output_argument(spec, there)})

    def launch_and_copy() -> None:
        # Results over the inputs, or of no rows: the library allocates memory of its own.
        for name, output in run_operation(library, spec, inputs).items():
            there[name].copy_(restore_payload_order(spec, name, output))

    return launch_and_copy


def _view_as_device_tensor(data: Any, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    """Return a CUDA tensor over a client's registered host memory or shared device memory.  The tensor keeps the
    memory mapped.
    """
    if not len(data):
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="cuda")
    flat = view_on_device(data) if isinstance(data, memoryview) else torch.as_tensor(data, device="cuda")
    return flat.view(TORCH_DTYPES[dtype]).view(shape)
