"""Copies of results to the memory that their callers have chosen."""

import time
from collections.abc import Mapping

import numpy as np

from normserve.backends.interface import PendingLaunch
from normserve.jobs.job import Batch, BatchResult
from normserve.memory.tensors import HostTensor

# Below this size, a copy takes less time than to find out that the result is already in its buffer.
_SHORT_BYTES = 32 * 1024


def fill_result_buffers(batch: Batch, value: BatchResult | PendingLaunch) -> BatchResult | PendingLaunch:
    """Copy results into the result buffers of jobs that have them, now or when the pending launch has ended."""
    if isinstance(value, BatchResult) and value.has_filled_buffers:
        return value
    for job in batch.jobs:
        if job.result_buffers is not None and not job.is_on_device:
            return (
                _BufferedPendingLaunch(batch, value)
                if isinstance(value, PendingLaunch)
                else _copy_batch_results(batch, value)
            )
    return value


class _BufferedPendingLaunch(PendingLaunch):
    def __init__(self, batch: Batch, flight: PendingLaunch) -> None:
        self._batch = batch
        self._launch = flight

    def poll(self, seconds: float) -> bool:
        return self._launch.poll(seconds)

    def wait(self) -> BatchResult:
        return _copy_batch_results(self._batch, self._launch.wait())


def _copy_batch_results(batch: Batch, execution: BatchResult) -> BatchResult:
    if execution.has_filled_buffers:
        return execution
    began = time.perf_counter()
    outputs = tuple(
        [
            results if job.result_buffers is None else _copy_results(results, job.result_buffers)
            for job, results in zip(batch.jobs, execution.results, strict=True)
        ]
    )
    copy_out_s = execution.copy_out_s + time.perf_counter() - began
    return execution._replace(results=outputs, copy_out_s=copy_out_s)


def _copy_results(results: Mapping[str, HostTensor], places: Mapping[str, memoryview]) -> dict[str, HostTensor]:
    moved = {}
    for name, tensor in results.items():
        nbytes = len(tensor.data)
        place = places[name][:nbytes]
        if nbytes <= _SHORT_BYTES:
            place[:] = tensor.data
        else:
            # Unlike a memoryview's own, this copy leaves Python's lock to others.
            source, target = np.frombuffer(tensor.data, np.uint8), np.frombuffer(place, np.uint8)
            if source.__array_interface__["data"] != target.__array_interface__["data"]:
                target[:] = source
        moved[name] = HostTensor(tensor.dtype, tensor.shape, place)
    return moved
