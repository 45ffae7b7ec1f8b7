"""Repeated jobs in the same memory: the tensors are prepared once."""

import time
from collections.abc import Mapping

from fusednorm.cpu import batch_invariant
from torch import Tensor

from normserve.backends.library_calls import bind_operation, collect_parameters
from normserve.backends.tensor_conversion import (
    compute_launch_shape,
    count_kernel_bytes,
    infer_batch_result_specs,
    move_channels_first,
    view_as_torch,
)
from normserve.jobs import result_specs
from normserve.jobs.job import BatchResult, NormJob, Op
from normserve.memory.tensors import HostTensor


def find_prepared_job(job: NormJob) -> "PreparedCpuJob | None":
    """Return the prepared form of a recurring job; None if the job does not recur, is empty, or has no result
    buffers.
    """
    recurrence = job.replay_slot
    if recurrence is None:
        return None
    prepared_job = recurrence.prepared
    if prepared_job is None and job.result_buffers is not None and len(job.x.data):
        prepared_job = recurrence.prepared = PreparedCpuJob(job, job.result_buffers)
    return prepared_job if isinstance(prepared_job, PreparedCpuJob) else None


class PreparedCpuJob:
    """A recurring job with prepared tensors, computed from its input memory into its result buffers."""

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
        """Compute the job from the current content of its tensors."""
        began = time.perf_counter()
        outputs = self._call()
        computed = time.perf_counter()
        for name, target in self._result_tensors.items():
            output: Tensor = getattr(outputs, name)
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
