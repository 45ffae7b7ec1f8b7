"""The CPU backend, through torch; for repeated jobs in the same memory, the tensors are prepared once."""

import os
import platform
import resource
import time
from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from fusednorm.cpu import batch_invariant
from fusednorm.errors import KernelInputError
from torch import Tensor

from normserve.backends.interface import ONE_AT_A_TIME
from normserve.backends.library_calls import (
    ResidentParameters,
    bind_operation,
    collect_parameters,
    name_results,
    run_operation,
)
from normserve.backends.tensor_conversion import (
    compute_launch_shape,
    count_batch_kernel_bytes,
    count_kernel_bytes,
    infer_batch_result_specs,
    move_channels_first,
    restore_payload_order,
    split_results,
    to_host_tensor,
    view_as_torch,
    view_rows,
)
from normserve.backends.warm_up_batches import make_warm_up_batches
from normserve.codec.api_names import is_parameter
from normserve.errors import DeviceOutOfMemoryError, InvalidShapeError, NormserveError
from normserve.jobs import result_specs
from normserve.jobs.device_description import DeviceDescription
from normserve.jobs.job import Batch, BatchResult, NormJob, Op, PassDirection, ReplaySlot
from normserve.memory.slabs import SlabPool
from normserve.memory.tensors import HostTensor

_COPY_BYTES = 64 * 2**20

# A few rows take 20 µs to compute; to the other thread and back it is 100, and torch splits nothing so small.
_INLINE_BYTES = 32 * 1024
# On one core the other thread would only take turns with this one.
_INLINE_BYTES_ON_ONE_CORE = 2 * 1024 * 1024

# Of rows that are gathered: as much torch's allocator has at hand.
_SCRATCH_BYTES = 512 * 1024


class CpuBackend:
    """The backend for the CPU: it computes one batch at a time with torch, and reads a single job's
    tensors in place.
    """

    name = "torch"
    launch_depth = ONE_AT_A_TIME
    compiled_classes = None
    shareable_device = None

    def __init__(
        self, threads: int = 0, slabs: SlabPool | None = None, warm_sizes: Collection[int] = (1024,)
    ) -> None:
        """Store the settings.

        Args:
            threads: of each operation; 0 leaves one core to the event loop.
            slabs: where large results are written.
            warm_sizes: lengths of rows with which `start` runs every operation.
        """
        self._warm_sizes = warm_sizes
        self._slabs = slabs or SlabPool(max_idle_bytes=0)
        cores = len(os.sched_getaffinity(0))
        self._thread_count = threads or max(1, cores - 1)
        self.max_inline_bytes = _INLINE_BYTES if cores > 1 else _INLINE_BYTES_ON_ONE_CORE

    def start(self) -> DeviceDescription:
        """Set torch's number of threads, run every operation once to warm up, and measure the copy bandwidth."""
        torch.set_num_threads(self._thread_count)
        for batch in make_warm_up_batches(self._warm_sizes):
            self.run(batch)
        return DeviceDescription(
            name=_read_processor_name(),
            kind="cpu",
            copy_bandwidth=_measure_copy_bandwidth(),
            versions={"python": platform.python_version(), "torch": str(torch.__version__)},
        )

    def load_parameters(self, op: Op, weight: HostTensor, bias: HostTensor | None) -> ResidentParameters:
        return ResidentParameters(
            view_as_torch(weight).clone(), None if bias is None else view_as_torch(bias).clone()
        )

    def run(self, batch: Batch) -> BatchResult:
        if len(batch.jobs) == 1 and (prepared_job := get_or_prepare_job(batch.jobs[0])) is not None:
            return prepared_job.run()
        return self._run_unprepared_batch(batch)

    @torch.inference_mode()
    def _run_unprepared_batch(self, batch: Batch) -> BatchResult:
        """Compute a batch that has no prepared form: gather its rows, call the library, and split the results."""
        job = batch.jobs[0]
        began = time.perf_counter()
        tensors = {
            name: move_channels_first(job.spec, name, self._gather_tensor(batch, name)) for name in job.tensors
        }
        if job.layer is not None:
            tensors |= collect_parameters(job.layer.backend_parameters)
        ready = time.perf_counter()
        outputs = run_operation(batch_invariant, job.spec, tensors, self._make_result_memory_argument(batch))
        computed = time.perf_counter()
        ordered = {
            name: to_host_tensor(restore_payload_order(job.spec, name, tensor)) for name, tensor in outputs.items()
        }
        shares = split_results(batch, ordered)
        return BatchResult(
            results=shares,
            kernel_bytes=count_batch_kernel_bytes(batch, shares),
            copy_in_s=ready - began,
            kernel_s=computed - ready,
            copy_out_s=time.perf_counter() - computed,
        )

    def can_launch_without_waiting(self, batch: Batch) -> bool:
        return False

    def compile_and_load_kernels(self, job: NormJob) -> None:
        """Do nothing: the CPU's kernels need no compilation."""

    def register_host_memory(self, memory: memoryview) -> object:
        """Do nothing: kernels work in any host memory."""
        return None

    def is_better_unbatched(self, job: NormJob) -> bool:
        # They share no launch in any case.
        return job.has_sums_over_rows

    def get_captured_launch(self, replay_slot: ReplaySlot) -> None:
        return None

    def make_replayer(self) -> None:
        return None

    def translate_error(self, error: Exception) -> NormserveError | None:
        """Translate an error of the inputs or a lack of memory; None for any other exception."""
        if isinstance(error, KernelInputError):
            return InvalidShapeError(str(error))
        exhausted = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
        if exhausted or isinstance(error, MemoryError | torch.OutOfMemoryError):
            return DeviceOutOfMemoryError("there is not enough memory for this request now")
        return None

    def read_memory_bytes(self) -> Mapping[str, int]:
        """Return the process's resident memory in bytes, as `resident`; empty on systems other than Linux."""
        try:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        except OSError:
            # Only Linux has this file.
            return {}
        return {"resident": pages * resource.getpagesize()}

    def _make_result_memory_argument(self, batch: Batch) -> dict[str, Any]:
        """Return the library's keyword argument that decides where a large output y is written.  Return {} for
        operations without this argument.

        It is written over the input, which is cached, if that is no longer needed; else into the job's
        result buffer, or into a slab.
        """
        spec = batch.jobs[0].spec
        if spec.op is Op.GROUP_NORM or spec.direction is PassDirection.BACKWARD:
            return {}
        job = batch.jobs[0]
        # Of several jobs the rows have been gathered in memory of their own.
        if len(batch.jobs) > 1 or job.may_overwrite:
            return {"memory_like": _reuse_input}
        if job.result_buffers is not None:
            place = job.result_buffers["y"]
            return {"memory_like": lambda x: torch.frombuffer(place[: x.nbytes], dtype=x.dtype).view(x.shape)}
        return {"memory_like": self._take_slab_like}

    def _take_slab_like(self, tensor: Tensor) -> Tensor:
        return self._take_slab_tensor(tensor.shape, tensor.dtype)

    def _take_slab_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Borrow a slab for a tensor; it returns to the pool when the result has been sent."""
        nbytes = prod(shape) * dtype.itemsize
        return torch.frombuffer(self._slabs.borrow(nbytes)[:nbytes], dtype=dtype).view(shape)

    def _gather_tensor(self, batch: Batch, name: str) -> Tensor:
        """Return the batch's tensor of that name: the rows of all jobs one after another, but a parameter only
        once.

        The tensor of a single job is not copied.
        """
        if is_parameter(name):
            return view_as_torch(batch.jobs[0].tensors[name])
        rows = view_rows(batch, name)
        if len(rows) == 1:
            return rows[0]
        if sum([part.nbytes for part in rows]) <= _SCRATCH_BYTES:
            return torch.cat(rows)
        # Without a slab, some MiB would be allocated and freed for each batch, and the process's size would vary
        # with it.
        shape = (sum([len(part) for part in rows]), *rows[0].shape[1:])
        return torch.cat(rows, out=self._take_slab_tensor(shape, rows[0].dtype))


def _reuse_input(tensor: Tensor) -> Tensor:
    return tensor


def _measure_copy_bandwidth() -> float:
    """Measure the memory's bandwidth in bytes per second, read plus written, by copies of a tensor that
    fits no cache.

    The fastest of a few copies counts.
    """
    source = torch.ones(_COPY_BYTES // 4, dtype=torch.float32, device="cpu")
    target = torch.zeros_like(source)
    fastest = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * _COPY_BYTES / fastest


def _read_processor_name() -> str:
    """Read the processor's name, for display."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def get_or_prepare_job(job: NormJob) -> "PreparedCpuJob | None":
    """Return the prepared form of a recurring job, which is made at the first job and kept in its replay slot.

    A recurring job is computed again and again in the same memory.  None if the job does not recur, or
    if it is empty or has no result buffers.
    """
    recurrence = job.replay_slot
    if recurrence is None:
        return None
    prepared_job = recurrence.prepared
    if prepared_job is None and job.result_buffers is not None and len(job.x.data):
        prepared_job = recurrence.prepared = PreparedCpuJob(job, job.result_buffers)
    return prepared_job if isinstance(prepared_job, PreparedCpuJob) else None


class PreparedCpuJob:
    """A recurring job whose library call is bound once to the job's input memory and result buffers.

    Each run computes the current content of that memory.
    """

    def __init__(self, job: NormJob, places: Mapping[str, memoryview]) -> None:
        """Args: places: the job's result buffers."""
        spec = job.spec
        tensors = {
            name: move_channels_first(spec, name, view_as_torch(tensor, compute_launch_shape(job, name, job.rows)))
            for name, tensor in job.tensors.items()
        }
        if job.layer is not None:
            tensors |= collect_parameters(job.layer.backend_parameters)
        given = {name: (tensor.dtype, tensor.shape) for name, tensor in job.tensors.items()}
        self._results = {
            name: _trim_to_nbytes(HostTensor(dtype, shape, places[name]))
            for name, (dtype, shape) in result_specs.infer_result_specs(spec, given, job.layer).items()
        }
        self._kernel_bytes = (count_kernel_bytes(job, self._results),)
        self._result_tensors = {
            name: move_channels_first(spec, name, view_as_torch(self._results[name], shape))
            for name, (_, shape) in infer_batch_result_specs(job, job.rows).items()
        }
        y = self._result_tensors.get("y")
        # Large rows are written there as they are computed; that memory may be x's.
        of_library = {} if y is None or spec.op is Op.GROUP_NORM else {"memory_like": lambda _: y}
        self._call = bind_operation(batch_invariant, spec, tensors, of_library)

    def run(self) -> BatchResult:
        """Compute the job from the current content of its tensors, into its result buffers."""
        began = time.perf_counter()
        outputs = name_results(self._call())
        computed = time.perf_counter()
        for name, target in self._result_tensors.items():
            output = outputs[name]
            if output.data_ptr() != target.data_ptr():
                target.copy_(output)
        return BatchResult(
            results=(self._results,),
            kernel_bytes=self._kernel_bytes,
            copy_in_s=0.0,
            kernel_s=computed - began,
            copy_out_s=time.perf_counter() - computed,
            has_filled_buffers=True,
        )


def _trim_to_nbytes(tensor: HostTensor) -> HostTensor:
    """Limit a tensor's memory to the bytes of its elements."""
    return HostTensor(tensor.dtype, tensor.shape, tensor.data[: tensor.nbytes])
