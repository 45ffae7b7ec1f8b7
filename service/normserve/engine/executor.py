"""The thread that owns the device, and the threads that wait for batches in progress.

Results are copied into the result buffers of jobs that have them, unless the backend has written them there.
"""

import asyncio
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from normserve.backends.interface import Backend, PendingLaunch
from normserve.errors import DeviceFailureError, DeviceOutOfMemoryError, NormserveError
from normserve.jobs.device_description import DeviceDescription
from normserve.jobs.job import Batch, BatchResult, NormJob, Op, QueueLane
from normserve.memory.tensors import HostTensor

log = logging.getLogger(__name__)

# Below this size, a copy takes less time than to find out that the result is already in its buffer.
_SHORT_BYTES = 32 * 1024

# Many times the duration of small batches, and short enough for the event loop.
_SOON_S = 0.2e-3
# The duration of batches of some MiB.
_WATCHED_S = 2e-3

# Limit of inline batches in the device's memory, which are computed at that memory's speed, in a fraction of a
# millisecond.
_INLINE_DEVICE_BYTES = 512 * 2**20

_PAUSE_S = 0.05

_WORDLESS = DeviceOutOfMemoryError("there is not enough memory for this request now")


class WorkOutcome(NamedTuple):
    """The outcome of work on the device: a value or an error, never both.

    Attributes:
        started_at: when the work began, by `time.perf_counter`.
    """

    started_at: float
    value: object = None
    error: NormserveError | None = None


Reply = Callable[[WorkOutcome], None]


def make_loop_reply(reply: Reply) -> Reply:
    """Wrap a callback of the event loop so that any thread may call it; it then runs on the loop.

    It does not run if the loop is closed.
    """
    loop = asyncio.get_running_loop()

    def schedule(outcome: WorkOutcome) -> None:
        try:
            loop.call_soon_threadsafe(reply, outcome)
        except RuntimeError:
            if not loop.is_closed():
                raise

    return schedule


@dataclass(frozen=True, slots=True)
class _WorkItem:
    """A function for a worker thread to call, and the callbacks for its outcome.

    Attributes:
        on_done: called with the outcome.
        lane: of the batch that the function launches.
        on_launched: called before, if the function has launched a batch that has not ended.
    """

    function: Callable[[], object]
    on_done: Reply
    lane: QueueLane
    on_launched: Reply | None = None


class _WorkerThread:
    """A thread that processes the items of its queue one after another."""

    def __init__(self, name: str, work: Callable[[_WorkItem], None]) -> None:
        self._inbox: queue.SimpleQueue[_WorkItem | None] = queue.SimpleQueue()
        self._process = work
        # A device that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def enqueue(self, work: _WorkItem) -> None:
        self._inbox.put(work)

    def stop(self, timeout_s: float) -> None:
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        """Process the items of the queue until None is received.

        An item that fails for lack of memory still gets a reply.
        """
        while (work := self._inbox.get()) is not None:
            try:
                self._process(work)
            except MemoryError:
                _reply_no_memory_with_retries(work)
            # The wait for the next piece must not keep this one's memory.
            del work


class Executor:
    """The threads that use the device.  One thread owns the device and launches batches; others wait for launched
    batches or compile kernels.

    The owner's thread launches batches one after another.  For each lane, another thread waits for
    the batches in flight, so that the owner is free to launch the next batch, and a small batch need
    not wait for a large one.  Replies are called on any of these threads.

    Attributes:
        last_error: the traceback of the last error that no request caused.
    """

    def __init__(self, make_backend: Callable[[], Backend]) -> None:
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self._owner = _WorkerThread("device-owner", self._process_device_work)
        self._waiting_threads = {
            lane: _WorkerThread(f"device-waits-{lane.value}", self._process_item) for lane in QueueLane
        }
        self._compiler = _WorkerThread("device-compiler", self._process_item)
        self.last_error = ""
        self._threads = (self._owner, *self._waiting_threads.values(), self._compiler)

    def start(self, reply: Reply) -> None:
        """Start the threads, and the device on the thread that owns it; `reply` gets a `DeviceDescription`."""
        for thread in self._threads:
            thread.start()
        self._owner.enqueue(_WorkItem(self._start_backend, reply, QueueLane.SMALL))

    def submit_batch(self, batch: Batch, on_launched: Reply, reply: Reply) -> None:
        """Queue a batch for the thread that owns the device; `reply` gets its `BatchResult`.

        Args: on_launched: called before the reply if the batch is in flight and the thread is free for the next.
        """
        self._owner.enqueue(
            _WorkItem(lambda: fill_result_buffers(batch, self.backend.run(batch)), reply, batch.lane, on_launched)
        )

    def is_inline_size(self, batch: Batch) -> bool:
        """Return whether a batch is so small that running it takes less time than handing it to a thread."""
        if batch.nbytes <= self.backend.max_inline_bytes:
            return True
        return batch.nbytes <= _INLINE_DEVICE_BYTES and batch.jobs[0].is_on_device

    def can_launch_inline(self, batch: Batch) -> bool:
        """Return whether `launch_inline` takes less time than handing a batch to a thread."""
        return self.backend.can_launch_without_waiting(batch)

    def launch_inline(self, batch: Batch) -> WorkOutcome:
        """Launch a batch on the caller's thread; the outcome's value is a `PendingLaunch`, or a
        `BatchResult` if the batch has ended.

        No batch may still wait for its launch by the owner's thread: a backend launches one at a time.
        """
        return self._run_catching(lambda: fill_result_buffers(batch, self.backend.run(batch)))

    def run_and_poll_inline(self, batch: Batch) -> WorkOutcome:
        """Run a batch on the caller's thread and poll it briefly; the outcome's value is its `BatchResult`.  If the
        batch takes longer, the value is a `PendingLaunch` to pass to `submit_wait`.

        The backend must allow it for this size (`Backend.max_inline_bytes`), and all batches of the owner's
        thread must have ended: a backend runs one batch at a time.
        """
        started = time.perf_counter()
        try:
            return WorkOutcome(started, _run_and_poll(self.backend, batch))
        except Exception as error:
            return self._make_failed_outcome(started, error)

    @property
    def poll_s(self) -> float:
        """Seconds for which to call `poll_launch` for a batch before a thread waits for it."""
        return _WATCHED_S

    def poll_launch(self, outcome: WorkOutcome) -> WorkOutcome | None:
        """Return the outcome of a batch in flight if it has ended, else None, without waiting.

        Args: outcome: of the launch, with the `PendingLaunch`.
        """
        flight = outcome.value
        assert isinstance(flight, PendingLaunch)
        try:
            return outcome._replace(value=flight.wait()) if flight.poll(0.0) else None
        except Exception as error:
            return self._make_failed_outcome(outcome.started_at, error)

    def submit_wait(self, outcome: WorkOutcome, lane: QueueLane, reply: Reply) -> None:
        """Queue a batch in flight for the thread that waits for the batches of its lane; `reply` gets the
        `BatchResult`.
        """
        started, flight = outcome.started_at, outcome.value
        assert isinstance(flight, PendingLaunch)
        self._waiting_threads[lane].enqueue(
            _WorkItem(flight.wait, lambda done: reply(done._replace(started_at=started)), lane)
        )

    def translate_error(self, error: Exception) -> NormserveError:
        """Translate the exception of a launch into the error for its caller."""
        meaning = self._make_failed_outcome(0.0, error).error
        assert meaning is not None
        return meaning

    def submit_parameters(self, op: Op, weight: HostTensor, bias: HostTensor | None, reply: Reply) -> None:
        """Queue a layer's parameters to be loaded in parallel with batches; `reply` gets the backend's handle for
        them.
        """
        self._compiler.enqueue(
            _WorkItem(lambda: self.backend.load_parameters(op, weight, bias), reply, QueueLane.SMALL)
        )

    def submit_compilation(self, job: NormJob, reply: Reply) -> None:
        """Queue the compilation of the kernels of the job's class, in parallel with batches; `reply` is called
        after it.
        """
        self._compiler.enqueue(
            _WorkItem(lambda: self.backend.compile_and_load_kernels(job), reply, QueueLane.SMALL)
        )

    def stop(self, timeout_s: float) -> None:
        """End the threads once their queues are empty.  After `timeout_s` the threads that still run are
        left alone.
        """
        give_up = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.stop(max(0.0, give_up - time.monotonic()))

    @property
    def is_running(self) -> bool:
        """Whether any of the threads is alive."""
        return any(thread.is_running for thread in self._threads)

    @property
    def backend(self) -> Backend:
        """The device's backend.

        Raises:
            RuntimeError: the backend has not started.
        """
        if self._backend is None:
            raise RuntimeError("the backend has not started")
        return self._backend

    def _start_backend(self) -> DeviceDescription:
        self._backend = self._make_backend()
        return self._backend.start()

    def _process_device_work(self, work: _WorkItem) -> None:
        """Process an item on the thread that owns the device.

        A batch that is then in flight is left to the thread that waits for its lane.
        """
        outcome = self._run_catching(work.function)
        if isinstance(outcome.value, PendingLaunch):
            if work.on_launched is not None:
                work.on_launched(outcome)
            self.submit_wait(outcome, work.lane, work.on_done)
        else:
            work.on_done(outcome)

    def _process_item(self, work: _WorkItem) -> None:
        work.on_done(self._run_catching(work.function))

    def _run_catching(self, work: Callable[[], object]) -> WorkOutcome:
        """Call a function, and return its value or its translated exception as an outcome."""
        started = time.perf_counter()
        try:
            return WorkOutcome(started, value=work())
        except Exception as error:
            return self._make_failed_outcome(started, error)

    def _make_failed_outcome(self, started: float, error: Exception) -> WorkOutcome:
        """Make the outcome of work that raised an exception; keep its traceback if no request caused it."""
        try:
            meaning = self._translate_and_log(error)
            if type(meaning) in (NormserveError, DeviceFailureError):
                self.last_error = "".join(traceback.format_exception(error))
            return WorkOutcome(started, error=meaning)
        except Exception:
            # There may be no memory for a message; the caller must get an error all the same.
            return WorkOutcome(started, error=_WORDLESS)

    def _translate_and_log(self, error: Exception) -> NormserveError:
        """Translate an exception into the error for callers, and log it if it is not such an error already."""
        if isinstance(error, NormserveError):
            return error
        meaning = None if self._backend is None else self._backend.translate_error(error)
        if meaning is None:
            log.exception("unexpected error in the executor", exc_info=error)
            return NormserveError("internal error in the server; its log has details")
        log.error("%s: %s", meaning.code, error)
        return meaning


def _reply_no_memory_with_retries(work: _WorkItem) -> None:
    """Reply that work failed for lack of memory.  While memory is too short even for the reply, sleep and
    reply again: a caller waits for it.
    """
    while True:
        try:
            work.on_done(WorkOutcome(time.perf_counter(), error=_WORDLESS))
            return
        except MemoryError:
            time.sleep(_PAUSE_S)


def _run_and_poll(backend: Backend, batch: Batch) -> BatchResult | PendingLaunch:
    """Run a batch, and poll it for a short time; return its result, or the pending launch."""
    value = fill_result_buffers(batch, backend.run(batch))
    return value.wait() if isinstance(value, PendingLaunch) and value.poll(_SOON_S) else value


def fill_result_buffers(batch: Batch, value: BatchResult | PendingLaunch) -> BatchResult | PendingLaunch:
    """Copy the results of a batch into the result buffers of those jobs that have them.

    For a pending launch, return one that copies the results after it has ended.
    """
    if isinstance(value, BatchResult) and value.has_filled_buffers:
        return value
    for job in batch.jobs:
        if job.result_buffers is not None and not job.is_on_device:
            return (
                _BufferedPendingLaunch(batch, value)
                if isinstance(value, PendingLaunch)
                else _copy_batch_results_unless_in_place(batch, value)
            )
    return value


class _BufferedPendingLaunch(PendingLaunch):
    """A pending launch whose results are copied into the jobs' result buffers after it has ended."""

    def __init__(self, batch: Batch, flight: PendingLaunch) -> None:
        self._batch = batch
        self._launch = flight

    def poll(self, seconds: float) -> bool:
        return self._launch.poll(seconds)

    def wait(self) -> BatchResult:
        return _copy_batch_results_unless_in_place(self._batch, self._launch.wait())


def _copy_batch_results_unless_in_place(batch: Batch, execution: BatchResult) -> BatchResult:
    """Copy the results of an ended batch into the jobs' result buffers, unless the backend has filled them."""
    if execution.has_filled_buffers:
        return execution
    began = time.perf_counter()
    outputs = tuple(
        [
            results if job.result_buffers is None else _copy_results_unless_in_place(results, job.result_buffers)
            for job, results in zip(batch.jobs, execution.results, strict=True)
        ]
    )
    copy_out_s = execution.copy_out_s + time.perf_counter() - began
    return execution._replace(results=outputs, copy_out_s=copy_out_s)


def _copy_results_unless_in_place(
    results: Mapping[str, HostTensor], buffers: Mapping[str, memoryview]
) -> dict[str, HostTensor]:
    """Copy one job's results into its result buffers, except those that the backend wrote there itself.
    Return them as tensors that are views of the buffers.

    Args: buffers: the buffer for each result, by name.
    """
    moved = {}
    for name, tensor in results.items():
        nbytes = len(tensor.data)
        place = buffers[name][:nbytes]
        if nbytes <= _SHORT_BYTES:
            place[:] = tensor.data
        else:
            # Unlike a memoryview's own, this copy leaves Python's lock to others.
            source, target = np.frombuffer(tensor.data, np.uint8), np.frombuffer(place, np.uint8)
            if source.__array_interface__["data"] != target.__array_interface__["data"]:
                target[:] = source
        moved[name] = HostTensor(tensor.dtype, tensor.shape, place)
    return moved
