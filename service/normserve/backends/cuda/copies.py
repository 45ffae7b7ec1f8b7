"""Batches that are copied to the device, computed there and copied back.

A large forward job goes in chunks of rows: while one chunk is copied in, the results of the one before are copied
out, and the bus transfers both ways at once.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from normserve.backends.cuda.in_flight import PendingBatch
from normserve.backends.cuda.parcels import (
    Bundle,
    at_places,
    collected,
    parcel_of,
    room_for,
    views,
    written,
)
from normserve.backends.cuda.streams import Pipeline
from normserve.backends.launch import call_of, destinations, launch, parameters_of
from normserve.backends.tensors import (
    channels_first,
    payload_order,
    results_of,
    results_to_write,
    shape_of,
    view,
)
from normserve.codec.tensor_names import is_parameter
from normserve.jobs.job import Batch, NormJob, Pass
from normserve.memory.host_tensors import HostTensor
from normserve.memory.slabs import SlabPool

# The host takes about as long to launch a chunk as the bus takes to transfer this many bytes each way.
_CHUNK_BYTES = 4 * 2**20
# More would keep the thread that launches them from everything else for longer, and save little: of n chunks the
# first copy in and the last copy out overlap with nothing.
_MOST_CHUNKS = 6
_ALIGNMENT = 16


def transfer_of(batch: Batch, slabs: SlabPool, library: ModuleType, device: str) -> "Whole | Divided":
    """A batch ready to be started; small tensors are packed.

    Args:
        slabs: memory for what is packed, and for results that have no place.
        library: has the functions of `fusednorm`.
        device: as torch names it.

    Raises:
        MemoryError: there is no memory for it.
    """
    chunks = chunks_of(batch.jobs[0]) if len(batch.jobs) == 1 else ()
    if chunks:
        return Divided(batch.jobs[0], chunks, slabs, library, device)
    return Whole(batch, slabs, library, device)


def chunks_of(job: NormJob, chunk_bytes: int | None = None, most: int | None = None) -> Sequence[range]:
    """The rows, or samples, of each chunk; none of a job that is not divided.

    Args: chunk_bytes, most: the fewest bytes of a chunk, and how many there may be.

    A gradient of parameters is a sum over all rows, and dropout's mask depends on a row's number.
    """
    if job.spec.direction is not Pass.FORWARD or job.spec.dropout:
        return ()
    if any(tensor.fortran_order for tensor in job.tensors.values()):
        return ()
    chunk_bytes, most = chunk_bytes or _CHUNK_BYTES, most or _MOST_CHUNKS
    if job.nbytes < 2 * chunk_bytes:
        return ()
    unit = _aligned_rows(job)
    units = job.rows // unit
    count = min(job.nbytes // chunk_bytes, most, units)
    if count < 2:
        return ()
    edges = [unit * (units * number // count) for number in range(count)]
    return [range(first, end) for first, end in itertools.pairwise([*edges, job.rows])]


def _aligned_rows(job: NormJob) -> int:
    """Of how many rows, or samples, every tensor has whole multiples of the alignment that kernels want."""
    heads = max(1, job.heads)
    count = job.rows // heads
    given = {name: (tensor.dtype, tensor.shape) for name, tensor in job.tensors.items() if not is_parameter(name)}
    sizes = [
        dtype.itemsize * math.prod(shape) for dtype, shape in (*given.values(), *results_of(job, job.rows).values())
    ]
    return heads * max([_ALIGNMENT // math.gcd(_ALIGNMENT, nbytes // count) for nbytes in sizes])


class Whole:
    """A batch in one piece, and the stages that it goes through.

    Attributes:
        results: of the launch, once it is started; complete when it is over.
    """

    results: Mapping[str, HostTensor]
    _there: dict[str, Tensor]
    _outputs: dict[str, Tensor] | Bundle

    def __init__(self, batch: Batch, slabs: SlabPool, library: ModuleType, device: str) -> None:
        self._batch = batch
        self._parcel = parcel_of(batch, slabs)
        self._slabs = slabs
        self._library = library
        self._device = device

    @torch.inference_mode()
    def start(self, pipeline: Pipeline) -> PendingBatch:
        """Put the stages on a pipeline's streams."""
        return pipeline.start(lambda: [self], None)

    def copy_in(self) -> None:
        self._there = self._parcel.brought(self._on_the_device)

    def compute(self) -> None:
        self._outputs = self._computed(self._there)

    def copy_out(self) -> None:
        self.results = self._copied_out(self._outputs)

    def _computed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | Bundle:
        job = self._batch.jobs[0]
        spec, results = job.spec, results_to_write(job, sum([each.rows for each in self._batch.jobs]))
        inputs = {name: channels_first(spec, name, tensor) for name, tensor in tensors.items()}
        if job.layer is not None:
            inputs |= parameters_of(job.layer.resident)
        if results is None or len(results) == 1:
            outputs = launch(self._library, spec, inputs)
            return {name: payload_order(spec, name, tensor) for name, tensor in outputs.items()}
        bundle = Bundle.empty(results, self._device)
        call_of(self._library, spec, inputs, {"out": destinations(spec, bundle.tensors())})()
        return bundle

    def _copied_out(self, outputs: dict[str, Tensor] | Bundle) -> dict[str, HostTensor]:
        jobs = self._batch.jobs
        if len(jobs) == 1 and jobs[0].places is not None:
            return written(outputs.tensors() if isinstance(outputs, Bundle) else outputs, jobs[0].places)
        return outputs.taken_home(self._slabs) if isinstance(outputs, Bundle) else collected(outputs, self._slabs)

    def _on_the_device(self, parts: Sequence[Tensor]) -> Tensor:
        """Copies of them on the device, one after another; complete when the current stream has come so far."""
        if len(parts) == 1:
            return parts[0].to(self._device, non_blocking=True)
        whole = torch.empty(sum([part.nbytes for part in parts]), dtype=torch.uint8, device=self._device)
        start = 0
        for part in parts:
            whole[start : start + part.nbytes].copy_(part, non_blocking=True)
            start += part.nbytes
        return whole


class Divided:
    """A job in chunks, and the stages that each of them goes through.

    Attributes:
        results: of the whole job; complete when it has landed.
    """

    def __init__(
        self, job: NormJob, chunks: Sequence[range], slabs: SlabPool, library: ModuleType, device: str
    ) -> None:
        """Args: chunks: the rows of each."""
        described = results_of(job, job.rows)
        if job.places is None:
            slab, offsets = room_for(described, slabs)
            self.results: Mapping[str, HostTensor] = views(slab, offsets, described)
        else:
            self.results = at_places(job.places, described)
        self._stages = Chunked(job, chunks, self.results, library)
        self._device = device

    @torch.inference_mode()
    def start(self, pipeline: Pipeline) -> PendingBatch:
        """Put the stages of all chunks on a pipeline's streams."""
        stages = self._stages

        def make_parts() -> Sequence[Chunk]:
            return stages.parts(
                {name: torch.empty_like(tensor, device=self._device) for name, tensor in stages.on_host().items()}
            )

        return pipeline.start(make_parts, stages)


class Chunked:
    """A job's tensors in chunks of rows, and what is computed of each."""

    def __init__(
        self, job: NormJob, chunks: Sequence[range], results: Mapping[str, HostTensor], library: ModuleType
    ) -> None:
        """Args:
        chunks: the rows of each.
        results: where they go.
        """
        self._job = job
        self._library = library
        unit = max(1, job.heads)
        self._counts = [len(chunk) // unit for chunk in chunks]
        self._came = {name: view(tensor, shape_of(job, name, job.rows)) for name, tensor in job.tensors.items()}
        self._goes = {name: view(tensor) for name, tensor in results.items()}
        self._parameters: Mapping[str, Tensor] = {}

    def on_host(self) -> Mapping[str, Tensor]:
        """All tensors that come and go, by their names."""
        return self._came | self._goes

    def parts(self, there: Mapping[str, Tensor]) -> "list[Chunk]":
        """The chunks; parameters come with the first.

        Args: there: tensors of the device, like `on_host`.
        """
        came, job = self._came, self._job
        parameters = {name: there[name] for name in came if is_parameter(name)}
        parts = [
            Chunk(self, *each)
            for each in zip(
                self._divided({name: tensor for name, tensor in came.items() if name not in parameters}),
                self._divided({name: there[name] for name in came if name not in parameters}),
                self._divided({name: there[name] for name in self._goes}),
                self._divided(self._goes),
                strict=True,
            )
        ]
        for name, tensor in parameters.items():
            parts[0].came[name], parts[0].inputs[name] = came[name], tensor
        self._parameters = parameters if job.layer is None else parameters_of(job.layer.resident)
        return parts

    def compute(self, chunk: "Chunk") -> None:
        """Launch one, on the thread's current stream."""
        spec = self._job.spec
        inputs = {name: channels_first(spec, name, tensor) for name, tensor in chunk.inputs.items()}
        written = {"out": destinations(spec, chunk.results)}
        call_of(self._library, spec, {**inputs, **self._parameters}, written)()

    def _divided(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Views of the tensors' rows, for each chunk."""
        pieces = [tensor.split(self._counts) for tensor in tensors.values()]
        return [dict(zip(tensors, each, strict=True)) for each in zip(*pieces, strict=True)]


class Chunk(NamedTuple):
    """The tensors of one chunk by their names: as they came, on the device, the results there, and their places."""

    of: Chunked
    came: dict[str, Tensor]
    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    places: dict[str, Tensor]

    def copy_in(self) -> None:
        for name, tensor in self.inputs.items():
            tensor.copy_(self.came[name], non_blocking=True)

    def compute(self) -> None:
        self.of.compute(self)

    def copy_out(self) -> None:
        for name, tensor in self.places.items():
            tensor.copy_(self.results[name], non_blocking=True)
