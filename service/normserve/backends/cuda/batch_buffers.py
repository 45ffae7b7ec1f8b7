"""The host memory of a batch's tensors and results, determined before its launch."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from normserve.backends.tensor_conversion import (
    TORCH_DTYPES,
    compute_launch_shape,
    count_batch_kernel_bytes,
    infer_batch_result_specs,
    split_results,
    view_as_torch,
)
from normserve.codec.api_names import is_parameter
from normserve.jobs.job import Batch, NormJob, NormSpec
from normserve.jobs.result_specs import Described
from normserve.memory.slabs import SlabPool
from normserve.memory.tensors import DeviceTensor, HostTensor

# Jobs of up to this size are packed: copies of their tensors would take longer to start than to run, and a body
# that was received together with its header is in no slab.  The host would copy larger jobs more slowly than the
# bus.
_PACKED_BYTES = 256 * 1024
# Kernels want tensors at multiples of 16 bytes; whole cache lines keep neighbours apart.
_ALIGNMENT = 128
_MOST_LAYOUTS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class LaunchLayout:
    """The dtypes and shapes of a launch's tensors and results, and their offsets in one slab, results last.

    A tensor and a result may have one name, as the scale of samples and the scale of float8 rows.

    Attributes:
        input_bytes: of the tensors.
        is_empty: x has no elements.
        kernel_bytes: by a job's number of rows, the fewest bytes that its share must move.
    """

    spec: NormSpec
    input_specs: Described
    result_specs: Described
    input_offsets: Mapping[str, int]
    result_offsets: Mapping[str, int]
    input_bytes: int
    nbytes: int
    is_empty: bool
    kernel_bytes: dict[int, int] = field(default_factory=dict)

    @property
    def result_bytes(self) -> int:
        return self.nbytes - self.input_bytes


@dataclass(frozen=True, slots=True)
class BatchBuffers:
    """The memory of a batch's tensors and results: a slab, or the memory of the jobs themselves.

    Attributes:
        slab: has the results, behind the tensors if these are packed; None if the results go to a
            single job's own buffers.
        is_packed: the tensors are gathered in the slab; else they stay in each job's memory.
    """

    batch: Batch
    layout: LaunchLayout
    slab: memoryview | None
    is_packed: bool

    def view_results(self) -> dict[str, HostTensor]:
        """View the launch's results as tensors in the buffers to which they are written.

        They are device tensors for a job in device memory.  Tensors in a slab keep the slab from returning
        to its pool.
        """
        layout, slab = self.layout, self.slab
        if slab is None:
            job = self.batch.jobs[0]
            assert job.result_buffers is not None
            return make_tensors_in_buffers(
                job.result_buffers, layout.result_specs, DeviceTensor if job.is_on_device else HostTensor
            )
        before = layout.input_bytes - self._result_offset
        found = {}
        for name, (dtype, shape) in layout.result_specs.items():
            start = layout.result_offsets[name] - before
            found[name] = HostTensor(dtype, shape, slab[start : start + prod(shape) * dtype.itemsize])
        return found

    def split_results(self) -> tuple[dict[str, HostTensor], ...]:
        """Return each job's results."""
        return split_results(self.batch, self.view_results())

    def count_kernel_bytes(self, shares: Sequence[Mapping[str, HostTensor]]) -> tuple[int, ...]:
        """Count, for each job, the fewest bytes that its share of the launch must move."""
        return count_batch_kernel_bytes(self.batch, shares, self.layout.kernel_bytes)

    def view_packed_inputs(self) -> Tensor:
        """View the packed tensors as one tensor of bytes."""
        assert self.slab is not None
        return torch.frombuffer(self.slab, dtype=torch.uint8, count=self.layout.input_bytes)

    def view_packed_results(self) -> Tensor:
        """View all results in the slab as one tensor of bytes."""
        assert self.slab is not None
        return torch.frombuffer(
            self.slab, dtype=torch.uint8, count=self.layout.result_bytes, offset=self._result_offset
        )

    @property
    def _result_offset(self) -> int:
        return self.layout.input_bytes if self.is_packed else 0


class BatchBufferAllocator:
    """An allocator of the buffers of batches, which caches their layouts.  Not thread-safe."""

    def __init__(self, slabs: SlabPool) -> None:
        self._slabs = slabs
        self._layouts: dict[Hashable, LaunchLayout] = {}

    def prepare_buffers(self, batch: Batch) -> BatchBuffers:
        """Borrow a slab of host memory for a batch's results.  If the jobs are small, also copy their tensors into
        the slab.

        There is no slab for the results of a single large job that has result buffers of its own.

        Raises:
            MemoryError: there is none.
        """
        layout = self._get_layout(batch)
        if is_packed(batch):
            slab = self._slabs.borrow(layout.nbytes)
            pack_inputs(batch, slab, layout.input_offsets)
            return BatchBuffers(batch, layout, slab, is_packed=True)
        is_placed = len(batch.jobs) == 1 and batch.jobs[0].result_buffers is not None
        return BatchBuffers(
            batch, layout, None if is_placed else self._slabs.borrow(layout.result_bytes), is_packed=False
        )

    def describe_job_buffers(self, job: NormJob) -> BatchBuffers:
        """Return the `BatchBuffers` of a job that runs directly in its own tensors and result buffers.  Nothing is
        allocated or copied.
        """
        batch = Batch((job,))
        return BatchBuffers(batch, self._get_layout(batch), None, is_packed=False)

    def _get_layout(self, batch: Batch) -> LaunchLayout:
        """Return the layout of a batch's launch, which is computed once for equal options, rows, dtypes and
        shapes.
        """
        job = batch.jobs[0]
        rows = sum([each.rows for each in batch.jobs])
        inputs = {
            name: (tensor.dtype, compute_launch_shape(job, name, rows)) for name, tensor in job.tensors.items()
        }
        layer = job.layer
        of_layer = None if layer is None else (layer.size, layer.dtype, layer.has_bias)
        key = (job.spec, rows, of_layer, *inputs.items())
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            results = infer_batch_result_specs(job, rows)
            of_inputs, inputs_bytes = _compute_offsets(inputs, 0)
            of_results, nbytes = _compute_offsets(results, inputs_bytes)
            is_empty = not prod(inputs["x"][1])
            layout = LaunchLayout(job.spec, inputs, results, of_inputs, of_results, inputs_bytes, nbytes, is_empty)
            self._layouts[key] = layout
        return layout


def is_packed(batch: Batch) -> bool:
    """Return whether a batch's tensors are gathered in a slab; those of large jobs stay in their memory."""
    return batch.nbytes <= _PACKED_BYTES * len(batch.jobs)


def pack_inputs(batch: Batch, slab: memoryview, offsets: Mapping[str, int]) -> None:
    """Copy all jobs' tensors into a slab.  The tensors of one name follow one another, from that name's offset on.

    A parameter is equal in all jobs, and is copied once.
    """
    for name in batch.jobs[0].tensors:
        start = offsets[name]
        for job in list_jobs_with(batch, name):
            data = _get_row_major_bytes(job.tensors[name])
            slab[start : start + len(data)] = data
            start += len(data)


def make_tensors_in_buffers(
    places: Mapping[str, memoryview], tensors: Described, kind: type[HostTensor] = HostTensor
) -> dict[str, HostTensor]:
    """Make a tensor of the given dtype and shape at the start of each named buffer.  A buffer may be larger than
    its tensor.

    Args: kind: `DeviceTensor` if the buffers are device memory.
    """
    return {
        name: kind(dtype, shape, places[name][: prod(shape) * dtype.itemsize])
        for name, (dtype, shape) in tensors.items()
    }


def list_jobs_with(batch: Batch, name: str) -> Sequence[NormJob]:
    """List the jobs whose tensors of that name a launch reads: parameters are equal in all jobs."""
    return batch.jobs[:1] if is_parameter(name) else batch.jobs


def view_slice(buffer: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """View a contiguous tensor in a buffer of bytes, from byte `start` on."""
    return buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def view_input_slices(buffer: Tensor, layout: LaunchLayout) -> dict[str, Tensor]:
    """Return views of a launch's tensors in a device buffer, which corresponds to the slab's bytes."""
    return _view_slices(buffer, layout.input_specs, layout.input_offsets, 0)


def view_result_slices(buffer: Tensor, layout: LaunchLayout, first: int) -> dict[str, Tensor]:
    """Return views of a launch's results in a device buffer, which corresponds to the slab's bytes from offset
    `first` on.
    """
    return _view_slices(buffer, layout.result_specs, layout.result_offsets, first)


def _view_slices(buffer: Tensor, tensors: Described, offsets: Mapping[str, int], first: int) -> dict[str, Tensor]:
    return {
        name: view_slice(buffer, offsets[name] - first, TORCH_DTYPES[dtype], shape)
        for name, (dtype, shape) in tensors.items()
    }


def _compute_offsets(tensors: Described, start: int) -> tuple[dict[str, int], int]:
    """Compute each tensor's aligned offset in a slab, the first at `start`; also return the end of the
    last tensor.
    """
    offsets = {}
    for name, (dtype, shape) in tensors.items():
        offsets[name] = start
        start += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, start


def _get_row_major_bytes(tensor: HostTensor) -> memoryview:
    """Return a tensor's bytes in row-major order."""
    return view_as_torch(tensor).reshape(-1).view(torch.uint8).numpy().data if tensor.fortran_order else tensor.data
