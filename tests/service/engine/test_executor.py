"""One thread does the work, in order, and errors come back as what they mean."""

import threading
import time

import pytest
from normserve.engine.executor import Executor
from normserve.errors import DeviceFailureError, DeviceOutOfMemoryError, InvalidShapeError
from normserve.jobs.job import Batch, BatchResult, Op, QueueLane
from normserve.memory.tensors import DeviceTensor

from tests.service.engine.fake_backend import EXECUTION, FakeBackend, Landing, Replies
from tests.service.jobs.fake_jobs import job, tensor


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


def _unnoted(outcome) -> None:
    """What is in flight is of no interest."""


def test_batches_run_on_one_thread_of_their_own(executor, backend, replies):
    for _ in range(3):
        executor.submit_batch(Batch((job(1, 4),)), _unnoted, replies)
        assert isinstance(replies.next().value, BatchResult)
    assert len(backend.threads) == 1
    assert threading.get_ident() not in backend.threads


def test_what_may_compile_keeps_no_batch_waiting(executor, backend, replies):
    backend.may_load.clear()
    executor.submit_parameters(Op.RMS_NORM, tensor(4), None, replies)
    executor.submit_compilation(job(1, 4), replies)
    executor.submit_batch(Batch((job(1, 4),)), _unnoted, replies)
    assert replies.next().value is EXECUTION
    backend.may_load.set()
    assert replies.next().error is replies.next().error is None
    assert len(backend.threads) == 2


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
    executor.submit_batch(Batch((job(1, 4),)), _unnoted, replies)
    assert type(replies.next().error) is meant


def fly(executor, backend, replies, lane=QueueLane.SMALL) -> Landing:
    landing = Landing()
    backend.results.append(landing)
    executor.submit_batch(Batch((job(1, 4),), lane), _unnoted, replies)
    return landing


def test_owner_goes_on_while_a_batch_is_in_flight(executor, backend, replies):
    landing = fly(executor, backend, replies)
    executor.submit_batch(Batch((job(1, 4),)), _unnoted, replies)
    assert replies.next().error is None
    landing.may_end.set()
    outcome = replies.next()
    assert outcome.value is EXECUTION
    assert landing.thread not in backend.threads


def test_small_batch_lands_before_a_large_one_that_took_off_earlier(executor, backend, replies):
    large = fly(executor, backend, replies, QueueLane.LARGE)
    small = fly(executor, backend, replies, QueueLane.SMALL)
    small.may_end.set()
    replies.next()
    assert not large.thread
    large.may_end.set()
    replies.next()


def test_start_is_that_of_the_take_off(executor, backend, replies):
    landing = fly(executor, backend, replies)
    executor.submit_batch(Batch((job(1, 4),)), _unnoted, replies)
    replies.next()
    landed = time.perf_counter()
    landing.may_end.set()
    assert replies.next().started_at < landed


def test_error_in_flight_comes_back_as_what_it_means(executor, backend, replies):
    landing = fly(executor, backend, replies)
    landing.error = MemoryError()
    landing.may_end.set()
    assert isinstance(replies.next().error, DeviceOutOfMemoryError)


def test_batch_that_runs_here_has_landed_when_the_caller_gets_it(executor, backend, replies):
    landing = Landing()
    landing.may_end.set()
    backend.results.append(landing)
    assert executor.run_and_poll_inline(Batch((job(1, 4),))).value is EXECUTION
    assert landing.thread == threading.get_ident()
    assert len(replies.all) == 1


def test_batch_that_takes_long_is_not_waited_for_here(executor, backend, replies):
    landing = Landing()
    backend.results.append(landing)
    outcome = executor.run_and_poll_inline(Batch((job(1, 4),)))
    executor.submit_wait(outcome, QueueLane.SMALL, replies)
    took_off = time.perf_counter()
    landing.may_end.set()
    outcome = replies.next()
    assert outcome.value is EXECUTION
    assert outcome.started_at < took_off
    assert landing.thread != threading.get_ident()


def test_a_batch_is_launched_here_while_the_owner_has_nothing_to_do(executor, backend, replies):
    batch = Batch((job(1, 4),))
    assert executor.can_launch_inline(batch)
    landing = Landing()
    backend.results.append(landing)
    outcome = executor.launch_inline(batch)
    assert outcome.value is landing
    assert threading.get_ident() in backend.threads
    executor.submit_wait(outcome, QueueLane.LARGE, replies)
    landing.may_end.set()
    assert replies.next().value is EXECUTION


def test_what_became_of_a_flight_is_known_once_it_has_landed(executor, backend):
    landing = Landing()
    backend.results.append(landing)
    outcome = executor.launch_inline(Batch((job(1, 4),)))
    assert executor.poll_launch(outcome) is None
    landing.may_end.set()
    landed = executor.poll_launch(outcome)
    assert landed.value is EXECUTION
    assert landed.started_at == outcome.started_at
    landing.error = MemoryError()
    assert isinstance(executor.poll_launch(outcome).error, DeviceOutOfMemoryError)


def test_the_launch_of_a_batch_is_reported_before_its_end(executor, backend, replies):
    landing = Landing()
    backend.results.append(landing)
    executor.submit_batch(Batch((job(1, 4),)), replies, replies)
    assert replies.next().value is landing
    landing.may_end.set()
    assert replies.next().value is EXECUTION


def test_only_the_end_is_reported_of_a_batch_that_is_never_in_flight(executor, backend, replies):
    executor.submit_batch(Batch((job(1, 4),)), replies, replies)
    assert replies.next().value is EXECUTION
    backend.error = MemoryError()
    executor.submit_batch(Batch((job(1, 4),)), replies, replies)
    assert isinstance(replies.next().error, DeviceOutOfMemoryError)
    assert len(replies.all) == 3


def test_what_would_wait_for_something_is_not_launched_here(executor, backend):
    backend.is_ready = False
    assert not executor.can_launch_inline(Batch((job(1, 4),)))


def test_batch_that_crashes_here_says_what_it_means(executor, backend, replies):
    landing = Landing()
    landing.may_end.set()
    landing.error = MemoryError()
    backend.results.append(landing)
    assert isinstance(executor.run_and_poll_inline(Batch((job(1, 4),))).error, DeviceOutOfMemoryError)


def test_device_that_fails_while_it_is_watched_says_what_it_means(executor, backend, replies):
    landing = Landing()
    landing.fault = DeviceFailureError("gone")
    backend.results.append(landing)
    assert executor.run_and_poll_inline(Batch((job(1, 4),))).error.detail == "gone"
    assert len(replies.all) == 1


def test_stop_waits_for_what_is_in_flight(executor, backend, replies):
    landing = fly(executor, backend, replies)
    threading.Timer(0.05, landing.may_end.set).start()
    executor.stop(20)
    assert replies.all[-1].value is EXECUTION


def test_unknown_error_is_logged_and_not_told(executor, backend, replies, caplog):
    backend.error = ZeroDivisionError("a secret")
    executor.submit_batch(Batch((job(1, 4),)), _unnoted, replies)
    error = replies.next().error
    assert error.code == "internal"
    assert "secret" not in error.detail
    assert "ZeroDivisionError" in caplog.text
    backend.error = None
    executor.submit_batch(Batch((job(1, 4),)), _unnoted, replies)
    assert replies.next().error is None


@pytest.mark.parametrize(
    ("raised", "is_kept"),
    [
        (ZeroDivisionError("a bug"), True),
        (DeviceFailureError("it hangs"), True),
        (InvalidShapeError("the caller's"), False),
        (MemoryError(), False),
    ],
)
def test_the_last_error_is_one_that_no_request_is_to_blame_for(executor, backend, replies, raised, is_kept):
    backend.error = raised
    executor.submit_batch(Batch((job(1, 4),)), _unnoted, replies)
    replies.next()
    assert (type(raised).__name__ in executor.last_error) == is_kept
    assert bool(executor.last_error) == is_kept


@pytest.mark.parametrize(
    ("cols", "on_device", "is_soon"),
    [(16, False, True), (17, False, False), (17, True, True), (2**18, True, True)],
)
def test_what_is_tiny_and_what_the_device_has_already_is_over_soon(executor, backend, cols, on_device, is_soon):
    backend.max_inline_bytes = 64
    x = tensor(1, cols)
    if on_device:
        x = DeviceTensor(x.dtype, x.shape, x.data)
    assert executor.is_inline_size(Batch((job(1, cols, tensors={"x": x}),))) == is_soon


def test_stop_finishes_what_was_handed_in(backend, replies):
    executor = Executor(lambda: backend)
    executor.start(replies)
    executor.submit_batch(Batch((job(1, 4),)), _unnoted, replies)
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


def test_whoever_waits_is_answered_though_there_is_no_memory_for_the_words(executor, backend, replies, monkeypatch):
    def without_memory(*_):
        raise MemoryError

    backend.error = MemoryError()
    monkeypatch.setattr(backend, "translate_error", without_memory)
    executor.submit_batch(Batch((job(1, 4),)), _unnoted, replies)
    assert replies.next().error.code == "device_out_of_memory"
    backend.error = None
    executor.submit_batch(Batch((job(1, 4),)), _unnoted, replies)
    assert replies.next().error is None


def test_an_answer_that_found_no_memory_is_given_as_soon_as_there_is_some(executor, replies):
    refused = []

    def reply(outcome):
        if len(refused) < 3:
            refused.append(outcome)
            raise MemoryError
        replies(outcome)

    executor.submit_batch(Batch((job(1, 4),)), _unnoted, reply)
    assert replies.next().error.code == "device_out_of_memory"
    executor.submit_batch(Batch((job(1, 4),)), _unnoted, replies)
    assert replies.next().error is None
