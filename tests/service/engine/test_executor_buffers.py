"""Results go to their places, whatever the backend did; results without places stay where they are."""

import numpy as np
import pytest
from normserve.backends.interface import PendingLaunch
from normserve.engine.executor import fill_result_buffers
from normserve.jobs.job import Batch, BatchResult, NormJob, NormSpec, Op, PassDirection
from normserve.memory.tensors import DType, HostTensor

SPEC = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, 1e-5)


def tensor(values: np.ndarray) -> HostTensor:
    return HostTensor(DType.FLOAT32, values.shape, values.reshape(-1).view(np.uint8).data)


def job(rows: int, place: memoryview | None = None) -> NormJob:
    x = np.zeros((rows, 16), np.float32)
    return NormJob(SPEC, {"x": tensor(x)}, result_buffers=None if place is None else {"y": place})


def execution(*results: np.ndarray) -> BatchResult:
    return BatchResult(tuple({"y": tensor(each)} for each in results), (1,) * len(results), 0.0, 0.5, 0.25)


class Flying(PendingLaunch):
    def __init__(self, landed: BatchResult) -> None:
        self._landed = landed

    def poll(self, seconds: float) -> bool:
        return seconds > 1

    def wait(self) -> BatchResult:
        return self._landed


@pytest.mark.parametrize("rows", [0, 3, 3000])
def test_a_result_lies_in_its_place_and_another_jobs_where_it_was(rows):
    y, other = np.full((rows, 16), 2, np.float32), np.full((1, 16), 3, np.float32)
    place = np.full(64 * rows + 100, 9, np.uint8)
    batch = Batch((job(rows, place.data), job(1)))
    value = execution(y, other)
    moved = fill_result_buffers(batch, value)
    assert moved.results[0]["y"].shape == (rows, 16)
    assert (place[: 64 * rows].view(np.float32) == 2).all()
    assert (place[64 * rows :] == 9).all()
    assert len(moved.results[0]["y"].data) == 64 * rows
    assert moved.results[1] is value.results[1]
    assert moved.copy_out_s > 0.25
    flight = fill_result_buffers(batch, Flying(value))
    assert not flight.poll(0)
    place[:] = 0
    assert flight.wait().results[0]["y"].shape == (rows, 16)
    assert (place[: 64 * rows].view(np.float32) == 2).all()


def test_what_the_backend_has_placed_is_not_looked_at():
    value = execution(np.zeros((3, 16), np.float32))._replace(has_filled_buffers=True)
    batch = Batch((job(3, memoryview(bytearray(192))),))
    assert fill_result_buffers(batch, value) is value
    assert fill_result_buffers(batch, Flying(value)).wait() is value


def test_what_lies_there_already_stays():
    y = np.arange(16 * 4000, dtype=np.float32).reshape(-1, 16)
    place = y.reshape(-1).view(np.uint8).data
    moved = fill_result_buffers(Batch((job(4000, place),)), execution(y))
    assert np.shares_memory(np.frombuffer(moved.results[0]["y"].data, np.uint8), y)
    assert y[3999, 15] == 16 * 4000 - 1


def test_without_places_nothing_happens():
    value = execution(np.ones((1, 16), np.float32))
    assert fill_result_buffers(Batch((job(1),)), value) is value
