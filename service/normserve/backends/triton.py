"""A CUDA device, through the fusednorm kernels."""

import platform
import time
from collections.abc import Mapping

import fusednorm
import torch
import triton
from fusednorm.device import copy_bandwidth
from fusednorm.errors import KernelInputError
from torch import Tensor

from normserve.backends.launch import ResidentParameters, launch, parameters_of
from normserve.backends.tensors import (
    PARAMETERS,
    TORCH_DTYPES,
    channels_first,
    kernel_bytes,
    payload_order,
    rows_of,
    split,
    view,
)
from normserve.backends.warmup import warm_up_batches
from normserve.device import DeviceInfo
from normserve.errors import (
    DeviceFailureError,
    DeviceOutOfMemoryError,
    InvalidShapeError,
    NormserveError,
)
from normserve.jobs import Batch, Execution, NormJob, Op
from normserve.slabs import Bytes, SlabPool
from normserve.tensors import HostTensor


class TritonBackend:
    """Brings batches to the device through pinned memory, runs them, and brings the results back."""

    name = "triton"

    def __init__(self, slabs: SlabPool | None = None) -> None:
        """Args: slabs: what bodies are received into; pinned from `start` on."""
        self._slabs = slabs or SlabPool(max_idle_bytes=0)

    def start(self) -> DeviceInfo:
        self._slabs.allocate = _pinned_memory
        for batch in warm_up_batches():
            self.run(batch)
        return DeviceInfo(
            name=torch.cuda.get_device_name(),
            kind="cuda",
            copy_bandwidth=copy_bandwidth(torch.device("cuda", torch.cuda.current_device())),
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "cuda": str(torch.version.cuda),
            },
        )

    def load(self, op: Op, weight: HostTensor, bias: HostTensor | None) -> ResidentParameters:
        # A layer says which rows will come; their dtype is most likely its own.
        if (op, bias is None) in ((Op.LAYER_NORM, False), (Op.RMS_NORM, True)):
            fusednorm.warmup(op.value, TORCH_DTYPES[weight.dtype], weight.shape[0], backward=False)
        return ResidentParameters(view(weight).cuda(), None if bias is None else view(bias).cuda())

    @torch.inference_mode()
    def run(self, batch: Batch) -> Execution:
        job = batch.jobs[0]
        began, copied_in, computed, copied_out = (_timed_event() for _ in range(4))
        staging = time.perf_counter()
        pinned = {name: _stage(batch, name) for name in job.tensors}
        staged = time.perf_counter()
        began.record()
        tensors = {name: _to_device(job, name, tensor) for name, tensor in pinned.items()}
        if job.layer is not None:
            tensors |= parameters_of(job.layer.resident)
        copied_in.record()
        outputs = launch(fusednorm, job.spec, tensors)
        computed.record()
        answers = {name: _to_host(payload_order(job.spec, name, out)) for name, out in outputs.items()}
        copied_out.record()
        copied_out.synchronize()
        shares = split(batch, answers)
        return Execution(
            outputs=shares,
            kernel_bytes=tuple(kernel_bytes(*pair) for pair in zip(batch.jobs, shares, strict=True)),
            copy_in_s=staged - staging + began.elapsed_time(copied_in) / 1000,
            kernel_s=copied_in.elapsed_time(computed) / 1000,
            copy_out_s=computed.elapsed_time(copied_out) / 1000,
        )

    def translate(self, error: Exception) -> NormserveError | None:
        if isinstance(error, KernelInputError):
            return InvalidShapeError(str(error))
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
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


def _pinned_memory(nbytes: int) -> Bytes:
    memory: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def _stage(batch: Batch, name: str) -> Tensor:
    """The batch's tensors of one name, one after another in pinned memory."""
    parts = [view(batch.jobs[0].tensors[name])] if name in PARAMETERS else rows_of(batch, name)
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    pinned = torch.empty(shape, dtype=parts[0].dtype, pin_memory=True)
    start = 0
    for part in parts:
        pinned[start : start + part.shape[0]].copy_(part)
        start += part.shape[0]
    return pinned


def _to_device(job: NormJob, name: str, pinned: Tensor) -> Tensor:
    return channels_first(job.spec, name, pinned.to("cuda", non_blocking=True))


def _to_host(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
