"""Batches that are copied to the device, computed there and copied back.

A large forward job goes in chunks of rows: while one chunk is copied in, the results of the one before are copied
out, and the bus transfers both ways at once.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from normserve.backends.cuda.batch_buffers import (
    BatchBuffers,
    list_jobs_with,
    view_input_slices,
    view_result_slices,
)
from normserve.backends.library_calls import bind_operation, collect_parameters, make_output_argument, run_operation
from normserve.backends.tensor_conversion import (
    TORCH_DTYPES,
    compute_launch_shape,
    infer_batch_result_specs,
    move_channels_first,
    restore_payload_order,
    view_as_torch,
)
from normserve.codec.api_names import is_parameter
from normserve.jobs.job import NormJob, NormSpec, PassDirection
from normserve.memory.tensors import HostTensor

_ALIGNMENT = 16

Copies = Sequence[tuple[Tensor, Tensor]]
"""Pairs of tensors: target and source."""


class ChunkLimits(NamedTuple):
    """The limits for dividing a job into chunks: the fewest bytes of a chunk, and the largest number of chunks.

    Of n chunks the first copy in and the last copy out overlap with nothing.
    """

    min_bytes: int
    max_count: int


# The host takes about as long to launch a chunk as the bus takes to transfer 4 MiB each way.  More chunks would
# keep the thread that launches them from everything else for longer, and save little.
LAUNCHED = ChunkLimits(4 * 2**20, 6)
# While another batch is copied, the bus is used both ways without chunks, and the host's time is what limits.
LAUNCHED_BEHIND_OTHERS = ChunkLimits(16 * 2**20, 6)
# To replay a graph of all chunks takes the host hardly longer than to launch one.
REPLAYED = ChunkLimits(2 * 2**20, 16)


class CopiedLaunch:
    """One launch with its copies to and from the device; each method enqueues its stage on the thread's
    current stream.
    """

    def __init__(self, arriving: Copies, compute: Callable[[], Copies]) -> None:
        """Args: compute: makes the launch; returns the copies that move the results to the host."""
        self._input_copies = arriving
        self._compute = compute
        self._result_copies: Copies = ()

    def copy_in(self) -> None:
        _enqueue_copies(self._input_copies)

    def compute(self) -> None:
        self._result_copies = self._compute()

    def copy_out(self) -> None:
        _enqueue_copies(self._result_copies)


def _enqueue_copies(pairs: Copies) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def make_whole_launch(buffers: BatchBuffers, library: ModuleType, device: str) -> CopiedLaunch:
    """Make the copies and the launch of an entire batch in one piece, and allocate its tensors on the device.

    Args:
        library: has the functions of `fusednorm`.
        device: as torch names it.
    """
    layout, batch = buffers.layout, buffers.batch
    arriving: list[tuple[Tensor, Tensor]] = []
    if buffers.is_packed:
        buffer = torch.empty(layout.input_bytes, dtype=torch.uint8, device=device)
        if layout.input_bytes:
            arriving.append((buffer, buffers.view_packed_inputs()))
        tensors = view_input_slices(buffer, layout)
    else:
        tensors = {}
        for name, (dtype, shape) in layout.input_specs.items():
            tensors[name] = joined = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)
            sources = [
                view_as_torch(job.tensors[name], compute_launch_shape(job, name, job.rows))
                for job in list_jobs_with(batch, name)
            ]
            targets = (joined,) if len(sources) == 1 else joined.split([len(source) for source in sources])
            arriving += zip(targets, sources, strict=True)

    def compute() -> Copies:
        spec, layer = layout.spec, batch.jobs[0].layer
        inputs = {name: move_channels_first(spec, name, tensor) for name, tensor in tensors.items()}
        if layer is not None:
            inputs |= collect_parameters(layer.backend_parameters)
        if layout.is_empty or len(layout.result_specs) == 1:
            # In memory that the library allocates: a call with output tensors takes twice the host's time (18 and 9
            # µs, adr/0020).
            outputs = run_operation(library, spec, inputs)
            there = {name: restore_payload_order(spec, name, tensor) for name, tensor in outputs.items()}
        else:
            buffer = torch.empty(layout.result_bytes, dtype=torch.uint8, device=device)
            there = view_result_slices(buffer, layout, layout.input_bytes)
            bind_operation(library, spec, inputs, {"out": make_output_argument(spec, there)})()
            if buffers.slab is not None:
                return [(buffers.view_packed_results(), buffer)]
        return [(view_as_torch(place), there[name]) for name, place in buffers.view_results().items()]

    return CopiedLaunch(arriving, compute)


def try_make_chunk_launches(
    job: NormJob,
    chunks: Sequence[range],
    results: Mapping[str, HostTensor],
    library: ModuleType,
    allocate: Callable[[Sequence[Tensor]], Sequence[Tensor] | None],
) -> Sequence[CopiedLaunch]:
    """Make one launch with its copies for each chunk of a job's rows; the first also copies the parameters.

    Empty if `allocate` finds no device memory.

    Args:
        chunks: the rows of each.
        results: the host tensors to which results are copied.
        allocate: makes tensors on the device, like those of the host.
    """
    host_inputs = {
        name: view_as_torch(tensor, compute_launch_shape(job, name, job.rows))
        for name, tensor in job.tensors.items()
    }
    host_results = {name: view_as_torch(tensor) for name, tensor in results.items()}
    there = allocate([*host_inputs.values(), *host_results.values()])
    if there is None:
        return ()
    device_inputs = dict(zip(host_inputs, there, strict=False))
    device_results = dict(zip(host_results, there[len(host_inputs) :], strict=True))
    own = {name: tensor for name, tensor in device_inputs.items() if is_parameter(name)}
    parameters = own if job.layer is None else collect_parameters(job.layer.backend_parameters)
    given = {name: tensor for name, tensor in host_inputs.items() if name not in own}
    unit = max(1, job.unit_rows)
    counts = [len(chunk) // unit for chunk in chunks]

    def split_rows(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Iterator[Mapping[str, Tensor]]:
        """View the tensors' rows of each chunk."""
        pieces = [tensors[name].split(counts) for name in names]
        return (dict(zip(names, each, strict=True)) for each in zip(*pieces, strict=True))

    parts: list[CopiedLaunch] = []
    views = (
        split_rows(given, given),
        split_rows(device_inputs, given),
        split_rows(device_results, host_results),
        split_rows(host_results, host_results),
    )
    for sources, inputs, outputs, homes in zip(*views, strict=True):
        arriving = [(inputs[name], source) for name, source in sources.items()]
        if not parts:
            arriving += [(tensor, host_inputs[name]) for name, tensor in own.items()]
        leaving = [(home, outputs[name]) for name, home in homes.items()]
        compute = functools.partial(_launch_chunk, library, job.spec, {**inputs, **parameters}, outputs, leaving)
        parts.append(CopiedLaunch(arriving, compute))
    return parts


def _launch_chunk(
    library: ModuleType,
    spec: NormSpec,
    tensors: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    result_copies: Copies,
) -> Copies:
    """Launch the kernels of one chunk.  Return `result_copies` unchanged; they copy the chunk's results to the
    host.
    """
    inputs = {name: move_channels_first(spec, name, tensor) for name, tensor in tensors.items()}
    bind_operation(library, spec, inputs, {"out": make_output_argument(spec, outputs)})()
    return result_copies


def try_divide_rows(job: NormJob, limits: ChunkLimits) -> Sequence[range]:
    """Divide a job's rows, or with a layout its samples, into ranges that are copied and computed separately.
    Return () if the job is not divided.

    Only large forward jobs without dropout are divided: a gradient of parameters is a sum over all
    rows, and dropout's mask depends on a row's number.
    """
    if job.spec.direction is not PassDirection.FORWARD or job.spec.dropout or job.nbytes < 2 * limits.min_bytes:
        return ()
    if not job.rows or any(tensor.fortran_order for tensor in job.tensors.values()):
        return ()
    unit = _compute_row_alignment(job)
    units = job.rows // unit
    count = min(job.nbytes // limits.min_bytes, limits.max_count, units)
    if count < 2:
        return ()
    edges = [unit * (units * number // count) for number in range(count)]
    return [range(first, end) for first, end in itertools.pairwise([*edges, job.rows])]


def _compute_row_alignment(job: NormJob) -> int:
    """Return the smallest number of rows, or samples, whose bytes are a multiple of 16 in every tensor.

    Chunks of a multiple of this number begin at addresses that are aligned for the kernels.
    """
    unit_rows = max(1, job.unit_rows)
    count = job.rows // unit_rows
    given = {name: (tensor.dtype, tensor.shape) for name, tensor in job.tensors.items() if not is_parameter(name)}
    sizes = [
        dtype.itemsize * math.prod(shape)
        for dtype, shape in (*given.values(), *infer_batch_result_specs(job, job.rows).values())
    ]
    return unit_rows * max([_ALIGNMENT // math.gcd(_ALIGNMENT, nbytes // count) for nbytes in sizes])
