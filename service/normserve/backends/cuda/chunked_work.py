"""Large jobs in shared host memory that recur: copied in, computed and copied out in chunks, by one graph.

To launch a chunk takes the host as long as the bus takes to transfer some MiB.  A graph has no such cost, so that
its chunks can be smaller: of n chunks only the first copy in and the last copy out overlap with nothing.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

from normserve.backends.cuda.copied import REPLAYED, chunk_parts, chunks_of
from normserve.backends.cuda.device_work import Work
from normserve.backends.cuda.graphs import CudaGraphs
from normserve.backends.cuda.pinned import is_registered
from normserve.backends.cuda.places import at_places
from normserve.backends.cuda.replays import Graphs, Repeated, Replays
from normserve.backends.cuda.streams import Pipeline, Streams
from normserve.backends.tensors import kernel_bytes, results_of, results_to_write
from normserve.jobs.job import NormJob

log = logging.getLogger(__name__)

# Of tensors and results; larger jobs gain little.
_MOST_BYTES = 160 * 2**20
_ALIGNMENT = 256


class Workspace:
    """Streams and memory of the device, which jobs use one after another."""

    def __init__(self, streams: Streams, graphs: Graphs, device: str) -> None:
        """Args: device: as torch names it."""
        self.pipeline = Pipeline(streams)
        self.replays = Replays(graphs)
        self._device = device
        self._memory: Tensor | None = None
        self._is_refused = False

    def tensors_like(self, given: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Tensors in its memory, which other jobs use as well; None without such memory."""
        if self._memory is None and not self._is_refused:
            self.pipeline.aside(self._allocate)
        if self._memory is None:
            return None
        found, start = {}, 0
        for name, tensor in given.items():
            found[name] = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return found

    def _allocate(self) -> None:
        try:
            self._memory = torch.empty(_MOST_BYTES, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            self._is_refused = True
            log.warning("large requests in shared host memory are not captured: %s", error)


def workspace(streams: Streams, device: str) -> Workspace:
    """With graphs of its own: they are replayed one after another."""
    return Workspace(streams, CudaGraphs(), device)


def is_chunked(job: NormJob) -> bool:
    """Whether a job is a large one that recurs in registered memory."""
    return bool(_chunks(job))


def chunked_work(job: NormJob, library: ModuleType, places: Iterator[Workspace]) -> Work | None:
    """The work of a job that `is_chunked`; None of any other, and without memory of the device.

    Args:
        library: the kernels.
        places: where such jobs are computed, in turn.
    """
    chunks = _chunks(job)
    if not chunks:
        return None
    assert job.places is not None
    place = next(places, None)
    if place is None:
        return None
    results = at_places(job.places, results_of(job, job.rows))
    with torch.inference_mode(False):
        parts = chunk_parts(job, chunks, results, library, place.tensors_like)
        if not parts:
            return None
        marks = place.pipeline.marks(len(parts))

        def put() -> None:
            place.pipeline.put(parts, marks)

        repeated = Repeated(put, job.spec, place.replays)
    return Work(results, kernel_bytes(job, results), place.pipeline, repeated, marks)


def _chunks(job: NormJob) -> Sequence[range]:
    """The rows of each chunk; none of a job that is better computed in another way."""
    if job.is_on_device or job.recurrence is None or job.places is None or job.may_overwrite:
        return ()
    wanted = results_to_write(job, job.rows)
    chunks = chunks_of(job, REPLAYED)
    if wanted is None or not chunks:
        return ()
    places = [job.places[name] for name in wanted]
    memory = [*[tensor.data for tensor in job.tensors.values()], *places]
    if sum(map(len, memory)) + _ALIGNMENT * len(memory) > _MOST_BYTES:
        return ()
    return chunks if all(map(is_registered, memory)) else ()
