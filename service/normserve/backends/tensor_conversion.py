"""Conversion between the host tensors of a batch and the torch tensors of one launch.

A launch has one tensor for each name: rows as [rows, N], or [units, rows, N] where the rows of a unit belong
together, and samples as [B, C, *spatial], where channels-last is a permuted view of the same memory.
"""

import warnings
from collections.abc import Mapping, Sequence
from math import prod

import torch
from fusednorm.traffic import compute_backward_bytes, compute_forward_bytes
from torch import Tensor

from normserve.codec.api_names import (
    COMPANIONS,
    OF_SAMPLES,
    PARAMETER_GRADIENTS,
    SAMPLE_GRADIENTS,
    STATISTICS,
    is_parameter,
)
from normserve.jobs import result_specs
from normserve.jobs.job import Batch, ChannelLayout, NormJob, NormSpec, PassDirection
from normserve.memory.tensors import DType, HostTensor

TORCH_DTYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT8_E4M3FN: torch.float8_e4m3fn,
}
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_STORED = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}

# Parameters of layers cannot be written to, and no tensor of a request is.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)

_LAID_OUT_AS_X = ("x", *COMPANIONS, "y", "residual_out", "dx", "dresidual")


def view_as_torch(tensor: HostTensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """View a tensor's memory as a torch tensor, in the tensor's shape or another with as many elements.

    Only a column-major tensor is copied, to reorder it.
    """
    dtype, shape = TORCH_DTYPES[tensor.dtype], tensor.shape if shape is None else shape
    if not len(tensor.data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(tensor.data, dtype=dtype)
    if tensor.fortran_order:
        axes = range(len(tensor.shape) - 1, -1, -1)
        return flat.view(tensor.shape[::-1]).permute(*axes).reshape(shape)
    return flat.view(shape)


def view_rows(batch: Batch, name: str) -> list[Tensor]:
    """View each job's tensor of that name, in a shape that can be stacked along the first axis."""
    return [view_as_torch(job.tensors[name], compute_launch_shape(job, name, job.rows)) for job in batch.jobs]


def compute_launch_shape(job: NormJob, name: str, rows: int) -> tuple[int, ...]:
    """Compute the shape that a tensor of jobs like this one has in a launch of `rows` rows, or samples.

    Rows whose heads have parameters of their own are grouped by token, [tokens, heads, N], and rows with a scale,
    shift or gate by sample, [samples, tokens, N] with scale, shift and gate [samples, N].
    """
    shape = job.tensors[name].shape
    if is_parameter(name):
        return shape
    if job.spec.layout is not None:
        return (rows, *shape[1:])
    if name in OF_SAMPLES:
        # There may be samples without rows.
        return (rows // job.unit_rows if rows else prod(shape[:-1]), shape[-1])
    of_rows = (rows // job.unit_rows, job.unit_rows) if job.unit_rows else (rows,)
    return of_rows if name in STATISTICS else (*of_rows, shape[-1])


def infer_batch_result_specs(job: NormJob, rows: int) -> dict[str, tuple[DType, tuple[int, ...]]]:
    """Infer the dtype and shape of each result of a launch of `rows` rows, or samples, of jobs like this one.

    The axes are in the order of the requests' tensors.
    """
    given = {name: (tensor.dtype, compute_launch_shape(job, name, rows)) for name, tensor in job.tensors.items()}
    return result_specs.infer_result_specs(job.spec, given, job.layer)


def move_channels_first(spec: NormSpec, name: str, tensor: Tensor) -> Tensor:
    """View a tensor of a payload as [B, C, *spatial], whatever the payload's layout; no copy."""
    return tensor.movedim(-1, 1) if spec.layout is ChannelLayout.NHWC and name in _LAID_OUT_AS_X else tensor


def restore_payload_order(spec: NormSpec, name: str, tensor: Tensor) -> Tensor:
    """Return a contiguous result with its axes in the order of the request.  Channels are last if the spec's layout
    has them last.

    This is the inverse of `move_channels_first`.
    """
    if spec.layout is ChannelLayout.NHWC and name in _LAID_OUT_AS_X:
        tensor = tensor.movedim(1, -1)
    return tensor.contiguous()


def to_host_tensor(tensor: Tensor) -> HostTensor:
    """Convert a contiguous torch tensor in host memory to a `HostTensor` that shares the memory."""
    if not tensor.numel():
        return HostTensor(DTYPES[tensor.dtype], tuple(tensor.shape), memoryview(b""))
    # Types that numpy lacks are passed to it as integers.
    stored = _STORED.get(tensor.dtype)
    array = (tensor if stored is None else tensor.view(stored)).numpy()
    return HostTensor(DTYPES[tensor.dtype], array.shape, array.data.cast("B"))


def split_results(batch: Batch, outputs: Mapping[str, HostTensor]) -> tuple[dict[str, HostTensor], ...]:
    """Split a launch's outputs into each job's share, without copies.

    The outputs have the jobs' rows in the batch's order, and their axes as in the requests.
    """
    if len(batch.jobs) == 1:
        return (_reshape_for_single_job(batch.jobs[0], outputs),)
    counts = [job.rows for job in batch.jobs]
    total = sum(counts)
    shares = []
    start = 0
    for job, count in zip(batch.jobs, counts, strict=True):
        stop = start + count
        shares.append(
            {name: _slice_result(job, name, output, start, stop, total) for name, output in outputs.items()}
        )
        start = stop
    return tuple(shares)


def _reshape_for_single_job(job: NormJob, outputs: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """Return a single job's outputs in the shapes of its request: the launch has all rows on one axis."""
    if job.spec.layout is not None or (len(job.x.shape) == 2 and not job.unit_rows):
        return dict(outputs)
    rows = job.rows
    return {name: _slice_result(job, name, output, 0, rows, rows) for name, output in outputs.items()}


def _slice_result(job: NormJob, name: str, output: HostTensor, start: int, stop: int, total: int) -> HostTensor:
    """View rows `start` to `stop` of an output in the job's shape; a parameter's gradient has no rows and
    is returned entire.

    Args: total: the rows of the output.
    """
    if name in PARAMETER_GRADIENTS:
        return output
    if name in _LAID_OUT_AS_X:
        shape = job.x.shape
    elif job.spec.layout is not None:
        shape = (stop - start, *output.shape[1:])
    elif name in SAMPLE_GRADIENTS:
        shape = job.tensors[name.removeprefix("d")].shape
    else:
        shape = job.x.shape[:-1]
    if stop - start == total:
        # Of the device's memory, where `output` is.
        return output if shape == output.shape else type(output)(output.dtype, shape, output.data)
    nbytes = len(output.data)
    return HostTensor(output.dtype, shape, output.data[nbytes * start // total : nbytes * stop // total])


def count_batch_kernel_bytes(
    batch: Batch, shares: Sequence[Mapping[str, HostTensor]], by_rows: dict[int, int] | None = None
) -> tuple[int, ...]:
    """Count, for each job, the fewest bytes that its share of the launch must move through the device's memory.

    The jobs are of one class, so that only the number of rows matters.

    Args:
        by_rows: counts of this class by number of rows, to which new ones are added.
    """
    by_rows = {} if by_rows is None else by_rows
    for job, share in zip(batch.jobs, shares, strict=True):
        if job.rows not in by_rows:
            by_rows[job.rows] = count_kernel_bytes(job, share)
    return tuple([by_rows[job.rows] for job in batch.jobs])


def count_kernel_bytes(job: NormJob, outputs: Mapping[str, HostTensor]) -> int:
    """Count the fewest bytes that a job's share of a launch must move through the device's memory.

    scale, shift and gate count, and their gradients: they grow with the samples, which a weight does not.
    """

    def width(tensor: HostTensor | None) -> int:
        return 0 if tensor is None else tensor.dtype.itemsize

    given = job.tensors.get
    numel = len(job.x.data) // job.x.dtype.itemsize
    sample_bytes = sum([len(tensor.data) for name, tensor in job.tensors.items() if name in OF_SAMPLES])
    if job.spec.direction is PassDirection.BACKWARD:
        # The gradients have as many bytes as the tensors: each has its tensor's type.
        return 2 * sample_bytes + compute_backward_bytes(
            numel,
            width(job.x),
            width(job.tensors["dy"]),
            dx=width(outputs["dx"]),
            residual=width(given("residual")),
            dresidual_out=width(given("dresidual_out")),
            dresidual=width(outputs.get("dresidual")),
        )
    return sample_bytes + compute_forward_bytes(
        numel,
        width(job.x),
        width(outputs["y"]),
        residual=width(given("residual")),
        residual_out=width(outputs.get("residual_out")),
    )
