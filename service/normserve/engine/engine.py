"""The connection between the event loop and the device: accepts jobs, returns results, enforces deadlines, drains.

All code here runs on the event loop's thread.  Jobs wait in the batcher, not in the executor, so that a job whose
deadline has passed or whose client has disconnected can be removed without cost for the device.
"""

import asyncio
import copy
import functools
import logging
import time
from collections.abc import Callable, Hashable
from enum import Enum

from normserve.backends.replayer import CapturedLaunch, LaunchReplayer
from normserve.engine.batcher import Batcher
from normserve.engine.compilation import CompilationQueue
from normserve.engine.executor import Executor, Reply, WorkOutcome, wrap_for_loop
from normserve.engine.launches import LaunchDispatcher, describe_batch
from normserve.engine.waiters import OnEnd, PendingJobs
from normserve.errors import (
    ClientLeftError,
    DeviceFailureError,
    DrainingError,
    NormserveError,
    NotReadyError,
)
from normserve.jobs.device import DeviceDescription
from normserve.jobs.job import Batch, BatchResult, NormJob, Op, ReplaySlot
from normserve.memory.device_segments import ShareableDevice
from normserve.memory.host_tensors import HostTensor
from normserve.metrics.metrics import Metrics

log = logging.getLogger(__name__)


class EngineState(Enum):
    """What the engine can do for a request."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Engine:
    """Feeds one executor.

    Attributes:
        launches: what the executor's threads run and have run.
        failed_work: what the device failed with, where that was a launch.
    """

    def __init__(
        self, executor: Executor, batcher: Batcher, compilation: CompilationQueue, metrics: Metrics
    ) -> None:
        self._executor = executor
        self._batcher = batcher
        self._compilation = compilation
        self._metrics = metrics
        self._replies = PendingJobs(self._withdraw)
        self._arrivals: dict[NormJob, bool] = {}
        self._on_device = LaunchDispatcher(executor, self._finish, self._feed)
        self.launches = self._on_device.progress
        self.state = EngineState.STARTING
        self.device: DeviceDescription | None = None
        self.failed_work: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        metrics.watch_queue(lambda: len(batcher) + len(compilation))

    @property
    def backend_name(self) -> str:
        """The backend that runs, or an empty string before it does."""
        return "" if self.device is None else self._executor.backend.name

    @property
    def last_error(self) -> str:
        """The traceback of the last error that no request is to blame for; an empty string without one."""
        return self._executor.last_error

    async def start(self) -> DeviceDescription:
        """Start the device; the engine still takes no jobs until `open`.

        Raises:
            NormserveError: the device cannot be used.
        """
        device = await self._ask(self._executor.start)
        assert isinstance(device, DeviceDescription)
        self.device = device
        backend = self._executor.backend
        self._compilation.foresee(backend.compiled or ())
        self._metrics.watch_device(backend.name, device, backend.memory_bytes)
        return device

    def open(self) -> None:
        """Take jobs from now on."""
        if self.state is EngineState.STARTING:
            self._enter(EngineState.READY)

    def close(self) -> None:
        """Take no more jobs; those already admitted are finished."""
        if self.state is not EngineState.FAILED:
            self._enter(EngineState.DRAINING)

    def give_up(self) -> None:
        """Tell everybody who still waits that the server ends first."""
        self._replies.refuse_all(DrainingError("the server ends before this request was finished"))

    @property
    def is_running(self) -> bool:
        """Whether a thread of the device has not ended: it computes, or waits for work."""
        return self._executor.is_running

    def stop(self, timeout_s: float) -> None:
        """End the device's thread; nothing may be submitted afterwards."""
        self._executor.stop(timeout_s)

    def require_ready(self) -> None:
        """Refuse new work unless it can be done.

        Raises:
            NotReadyError, DrainingError: by state.
        """
        match self.state:
            case EngineState.READY:
                return
            case EngineState.STARTING:
                raise NotReadyError("the server is still warming up")
            case EngineState.DRAINING:
                raise DrainingError("the server is shutting down and finishes only what it has admitted")
            case EngineState.FAILED:
                raise _make_not_launched_error()

    async def load(self, op: Op, weight: HostTensor, bias: HostTensor | None) -> object:
        """Bring a layer's parameters to where the device wants them.

        Raises:
            NormserveError: the device could not take them.
        """
        return await self._ask(lambda reply: self._executor.load(op, weight, bias, reply))

    def share(self, memory: memoryview) -> object:
        """Prepare memory that clients on this host share for the device, for as long as the returned object lives.

        Called from any thread, once the engine is ready.
        """
        return self._executor.backend.share(memory)

    @property
    def device_memory(self) -> ShareableDevice | None:
        """Whose memory clients on this host may have; None where none can be shared.  Asked once it is ready."""
        return self._executor.backend.device_memory

    def make_replayer(self) -> LaunchReplayer | None:
        """What answers recurring requests without `begin`; None where there is none.  Called once it is ready."""
        return self._executor.backend.make_replayer()

    def computes_alone(self, job: NormJob) -> bool:
        """Whether jobs that recur like this one are computed each by itself, where their client has them."""
        return self._executor.backend.computes_alone(job)

    def replay(self, recurrence: ReplaySlot) -> CapturedLaunch | None:
        """The captured launch of jobs that recur, if there is one."""
        return self._executor.backend.replay(recurrence)

    @property
    def may_replay(self) -> bool:
        """Whether captured launches may be launched now, on this thread."""
        return self.state is EngineState.READY and not self._on_device.is_launching

    def note_failed_replay(self, code: int) -> NormserveError:
        """A captured launch has failed, and with it the device: what its caller is told.

        Args: code: the driver's.
        """
        error = self._executor.translated(RuntimeError(f"CUDA error: {code}, of a captured launch"))
        self._note_failure(error)
        return error

    def begin(self, job: NormJob, deadline: float, on_end: OnEnd) -> None:
        """Run a job; who began it calls `end` once told, or when it is not wanted any more.

        Args:
            deadline: when execution must have begun, by `time.perf_counter`.
            on_end: told what became of it, later and not in this call.

        Raises:
            DeadlineExceededError: the deadline has passed.
            NormserveError: the job cannot be run; there is nothing to end.
        """
        if self.state is EngineState.FAILED:
            raise _make_not_launched_error()
        self._replies.expect(job, deadline, on_end)
        try:
            is_compiled = self._is_compiled(job)
        except NormserveError:
            self.end(job)
            raise
        if not self._arrivals:
            # When this turn of the loop ends: what else came in it shares the launch, without a wait.
            asyncio.get_running_loop().call_soon(self._admit)
        self._arrivals[job] = is_compiled

    def end(self, job: NormJob) -> None:
        """The caller no longer waits for a job: it leaves the queue, if it is still there."""
        if not self._replies.forget(job):
            self._withdraw(job)

    def withdraw(self, job: NormJob) -> None:
        """The client does not want a job any more: one that waits is refused, one that runs has its result."""
        if self._replies.has_begun(job):
            return
        self._withdraw(job)
        self._replies.refuse((job,), ClientLeftError("the client left before its result was ready"))

    def _is_compiled(self, job: NormJob) -> bool:
        """Whether a job may run now; if not, it will be queued once its kernels are there.

        Raises:
            OverloadedError: too much is being compiled.
        """
        if self._executor.backend.compiled is None:
            return True
        if job.recurrence is not None and job.recurrence.prepared is not None:
            # The like of it has run.
            return True
        kind = job.kernel_class()
        if kind in self._compilation:
            return True
        if self._compilation.wait_for(kind, job):
            self._executor.compile(job, wrap_for_loop(functools.partial(self._end_compile, kind)))
        return False

    def _end_compile(self, kind: Hashable, outcome: WorkOutcome) -> None:
        jobs = self._compilation.end(kind, compiled=outcome.error is None)
        if outcome.error is not None:
            self._note_failure(outcome.error)
            self._replies.refuse(jobs, outcome.error)
            return
        self._metrics.observe_compile(time.perf_counter() - outcome.started)
        for job in jobs:
            self._batcher.add(job)
        self._feed()

    def _admit(self) -> None:
        """Give the device what it can take, and let the clock run for what must wait."""
        if len(self._arrivals) == 1 and self.state is not EngineState.FAILED:
            self._admit_alone(*self._arrivals.popitem())
            return
        # Some may have left since.
        arrivals = {job: ready for job, ready in self._arrivals.items() if self._replies.is_awaited(job)}
        self._arrivals = {}
        if self.state is EngineState.FAILED:
            self._replies.refuse(arrivals, _make_not_launched_error())
            return
        for job, is_compiled in arrivals.items():
            if is_compiled:
                self._batcher.add(job)
        self._feed()
        for job in arrivals:
            self._replies.keep_deadline(job)

    def _admit_alone(self, job: NormJob, is_compiled: bool) -> None:
        """`_admit` for what nothing else came with: it has no kin to look for if nothing waits either."""
        if not self._replies.is_awaited(job):
            return
        if is_compiled:
            lane = self._batcher.lane_of(job)
            if not self._batcher and self._on_device.has_room(lane):
                self._launch(Batch((job,), lane))
            else:
                self._batcher.add(job)
                self._feed()
        self._replies.keep_deadline(job)

    def _feed(self) -> None:
        while self.state is not EngineState.FAILED:
            batch = self._batcher.take(self._on_device.free_lanes())
            if batch is None:
                return
            self._launch(batch)

    def _launch(self, batch: Batch) -> None:
        self._replies.note_start(batch)
        outcome = self._on_device.run(batch)
        if outcome is not None:
            self._conclude(batch, outcome)

    def _finish(self, batch: Batch, outcome: WorkOutcome) -> None:
        self._conclude(batch, outcome)
        self._feed()

    def _conclude(self, batch: Batch, outcome: WorkOutcome) -> None:
        if outcome.error is not None:
            self._note_failure(outcome.error, batch)
            self._replies.refuse(batch.jobs, outcome.error)
            return
        execution = outcome.value
        assert isinstance(execution, BatchResult)
        self._replies.give(batch, execution, outcome.started)
        # No caller waits for this.
        self._metrics.observe_launch(batch, execution)

    def _note_failure(self, error: NormserveError, batch: Batch | None = None) -> None:
        """A failed device is of no more use: refuse the jobs that wait for it and tell the process.

        Only jobs of a launch that failed are told of the failure: one of them may be its cause, and would make the
        next server fail.  Those that no launch had may be sent again.
        """
        if not isinstance(error, DeviceFailureError) or self.state is EngineState.FAILED:
            return
        self.failed_work = None if batch is None else describe_batch(batch)
        self._enter(EngineState.FAILED)
        log.critical("the device failed, the server ends: %s", error.detail)
        queued = (*self._batcher, *self._compilation.jobs())
        for job in queued:
            self._withdraw(job)
        self._replies.refuse(queued, _make_not_launched_error())
        self.on_failure()

    def _withdraw(self, job: NormJob) -> None:
        self._batcher.discard(job)
        self._compilation.discard(job)

    def _enter(self, state: EngineState) -> None:
        self.state = state
        self._metrics.set_ready(state is EngineState.READY)

    async def _ask(self, request: Callable[[Reply], None]) -> object:
        """Hand something to the executor and wait for its reply."""
        future: asyncio.Future[WorkOutcome] = asyncio.get_running_loop().create_future()
        request(wrap_for_loop(lambda outcome: None if future.done() else future.set_result(outcome)))
        outcome = await future
        if outcome.error is not None:
            self._note_failure(outcome.error)
            raise copy.copy(outcome.error)
        return outcome.value


def _make_not_launched_error() -> NotReadyError:
    """The error of a job that a failed device has not been given."""
    return NotReadyError("the device has failed before it was given this request, and the server is about to exit")
