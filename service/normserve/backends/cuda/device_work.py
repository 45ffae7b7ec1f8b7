"""Jobs whose tensors and results are accessed where they are: in device memory, or in registered host memory."""

import logging
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from normserve.backends.cuda.in_flight import PartMarks, PendingBatch
from normserve.backends.cuda.pinned import device_view, is_registered
from normserve.backends.cuda.places import at_places
from normserve.backends.cuda.replays import Repeated, Replays
from normserve.backends.cuda.streams import Pipeline
from normserve.backends.launch import call_of, destinations, launch, parameters_of
from normserve.backends.tensors import (
    TORCH_DTYPES,
    channels_first,
    kernel_bytes,
    payload_order,
    results_of,
    results_to_write,
    shape_of,
)
from normserve.codec.tensor_names import is_parameter
from normserve.jobs import results
from normserve.jobs.job import NormJob
from normserve.memory.device_segments import Device, DeviceMemoryError
from normserve.memory.device_tensors import DeviceTensor
from normserve.memory.host_tensors import DType, HostTensor

log = logging.getLogger(__name__)

# Of host memory, all tensors and results.
_MOST_HOST_BYTES = 2**21 + 2**16

# About as many run at a time.
_PROGRAMS = 132


def shareable(ordinal: int) -> Device | None:
    """A device whose memory clients may have; None where that cannot be."""
    try:
        return Device(ordinal)
    except DeviceMemoryError as error:
        log.warning("clients on this host cannot have memory of the device: %s", error)
        return None


class Work:
    """One job's launch in memory that its client has, made again and again: it keeps that memory mapped.

    Attributes:
        results: where they lie.
        kernel_bytes: the fewest bytes that the launch must move.
        pipeline: whose compute stage's stream it is made on, always.
        marks: of its parts, which are copied; none where nothing is.
    """

    def __init__(
        self,
        results: Mapping[str, HostTensor],
        kernel_bytes: int,
        pipeline: Pipeline,
        repeated: Repeated,
        marks: Sequence[PartMarks] = (),
    ) -> None:
        self.results = results
        self.kernel_bytes = kernel_bytes
        self.pipeline = pipeline
        self.marks = marks
        self._repeated = repeated

    def start(self) -> PendingBatch:
        """Launch it, of what its tensors hold then."""
        pending = self.pipeline.start_one(self.compute, self, self.marks)
        # While the device computes it.
        pending.expect((self.results,), (self.kernel_bytes,), are_placed=True)
        if self.is_worth_a_graph:
            self.pipeline.aside(self.capture)
        return pending

    def compute(self) -> None:
        """Put it on the thread's current stream."""
        self._repeated.make()

    @property
    def is_worth_a_graph(self) -> bool:
        """Whether it came so often by now that `capture` pays."""
        return self._repeated.is_due

    @property
    def graph(self) -> Any:
        """What is replayed; None before it has been captured."""
        return self._repeated.graph

    def capture(self) -> None:
        """Have it replayed when it comes again; on the stream that it was computed on."""
        self._repeated.capture()


def is_in_reach(job: NormJob) -> bool:
    """Whether a job alone in its launch is computed where its tensors are.

    In host memory that is what comes again and again, in registered memory, and is small: kernels read and write
    it over the bus at once, while of larger tensors copies use the bus better.
    """
    if job.is_on_device:
        return True
    if job.recurrence is None or job.places is None:
        return False
    wanted = results_to_write(job, job.rows)
    if wanted is None or job.may_overwrite or not len(job.x.data):
        return False
    places = [job.places[name] for name in wanted]
    nbytes = job.nbytes + sum([dtype.itemsize * prod(shape) for dtype, shape in wanted.values()])
    # Programs read parameters each for itself.
    parameters = [tensor.nbytes for name, tensor in job.tensors.items() if is_parameter(name)]
    nbytes += min(job.rows, _PROGRAMS) * sum(parameters)
    memory = [*[tensor.data for tensor in job.tensors.values()], *places]
    return nbytes <= _MOST_HOST_BYTES and all(map(is_registered, memory))


def device_work(job: NormJob, library: ModuleType, pipeline: Pipeline, replays: Replays) -> Work:
    """The work of a job that `is_in_reach`.

    Args:
        library: the kernels.
        replays: of graphs; what comes many times is replayed.
    """
    assert job.places is not None
    given = {name: (tensor.dtype, tensor.shape) for name, tensor in job.tensors.items()}
    described = results.results_of(job.spec, given, job.layer)
    kind = DeviceTensor if job.is_on_device else HostTensor
    found: Mapping[str, HostTensor] = at_places(job.places, described, kind)
    # What is made in inference mode can be used nowhere else.
    with torch.inference_mode(False):
        repeated = Repeated(_call(job, found, library), job.spec, replays)
    return Work(found, kernel_bytes(job, found), pipeline, repeated)


def _call(job: NormJob, found: Mapping[str, HostTensor], library: ModuleType) -> Callable[[], object]:
    spec = job.spec
    came = {
        name: channels_first(spec, name, _seen(tensor.data, tensor.dtype, shape_of(job, name, job.rows)))
        for name, tensor in job.tensors.items()
    }
    if job.layer is not None:
        came |= parameters_of(job.layer.resident)
    places = {
        name: _seen(found[name].data, dtype, shape) for name, (dtype, shape) in results_of(job, job.rows).items()
    }
    if results_to_write(job, job.rows) is not None and came["x"].numel() and not job.may_overwrite:
        return call_of(library, spec, came, {"out": destinations(spec, places)})

    def launch_and_copy() -> None:
        # Over what came, of no rows, or with a sum that is converted: the library gives memory of its own.
        for name, output in launch(library, spec, came).items():
            places[name].copy_(payload_order(spec, name, output))

    return launch_and_copy


def _seen(data: Any, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    """What lies there as a tensor, which keeps it mapped."""
    if not len(data):
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="cuda")
    flat = device_view(data) if isinstance(data, memoryview) else torch.as_tensor(data, device="cuda")
    return flat.view(TORCH_DTYPES[dtype]).view(shape)
