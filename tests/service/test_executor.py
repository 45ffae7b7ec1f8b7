"""One thread does the work, in order, and errors come back as what they mean."""

import threading

import pytest
from normserve.device import DeviceInfo
from normserve.errors import DeviceFailureError, DeviceOutOfMemoryError, InvalidShapeError
from normserve.executor import Executor
from normserve.jobs import Batch, Execution, Op

from .fake_jobs import job, tensor


class FakeBackend:
    """Notes the threads that call it; raises what it was told to."""

    name = "fake"

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.error: Exception | None = None

    def start(self):
        return self._noted(DeviceInfo("a device", "cpu", 1e9, {}))

    def load(self, op, weight, bias):
        return self._noted((weight, bias))

    def run(self, batch):
        return self._noted(Execution(({},), (0,), 0.0, 0.0, 0.0))

    def translate(self, error):
        return DeviceOutOfMemoryError("dry") if isinstance(error, MemoryError) else None

    def memory_bytes(self):
        return {}

    def _noted(self, value):
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        return value


class Replies:
    """Collects replies and lets the test wait for each."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self.all = []

    def __call__(self, outcome):
        self.all.append(outcome)
        self._arrived.release()

    def next(self):
        assert self._arrived.acquire(timeout=20)
        return self.all[-1]


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def replies():
    return Replies()


@pytest.fixture
def executor(backend, replies):
    started = Executor(lambda: backend)
    started.start(replies)
    assert replies.next().value.name == "a device"
    yield started
    started.stop(20)


def test_everything_runs_on_one_thread_of_its_own(executor, backend, replies):
    executor.run(Batch((job(1, 4),)), replies)
    assert isinstance(replies.next().value, Execution)
    executor.load(Op.RMS_NORM, tensor(4), None, replies)
    assert replies.next().error is None
    assert len(backend.threads) == 1
    assert threading.get_ident() not in backend.threads


@pytest.mark.parametrize(
    ("raised", "meant"),
    [
        (MemoryError(), DeviceOutOfMemoryError),
        (DeviceFailureError("gone"), DeviceFailureError),
        (InvalidShapeError("odd"), InvalidShapeError),
    ],
)
def test_errors_come_back_as_what_they_mean(executor, backend, replies, raised, meant):
    backend.error = raised
    executor.run(Batch((job(1, 4),)), replies)
    assert type(replies.next().error) is meant


def test_unknown_error_is_logged_and_not_told(executor, backend, replies, caplog):
    backend.error = ZeroDivisionError("a secret")
    executor.run(Batch((job(1, 4),)), replies)
    error = replies.next().error
    assert error.code == "internal"
    assert "secret" not in error.detail
    assert "ZeroDivisionError" in caplog.text
    backend.error = None
    executor.run(Batch((job(1, 4),)), replies)
    assert replies.next().error is None


def test_stop_finishes_what_was_handed_in(backend, replies):
    executor = Executor(lambda: backend)
    executor.start(replies)
    executor.run(Batch((job(1, 4),)), replies)
    executor.stop(20)
    assert len(replies.all) == 2


def test_backend_that_cannot_be_made(replies):
    def make():
        raise DeviceFailureError("there is none")

    executor = Executor(make)
    executor.start(replies)
    assert replies.next().error.detail == "there is none"
    with pytest.raises(RuntimeError, match="not started"):
        _ = executor.backend
    executor.stop(20)
