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

from normserve.backends.replay_interface import CapturedLaunch, LaunchReplayer
from normserve.engine.batcher import Batcher
from normserve.engine.compilation_queue import CompilationQueue
from normserve.engine.executor import Executor, Reply, WorkOutcome, make_loop_reply
from normserve.engine.launch_dispatcher import LaunchDispatcher, describe_batch
from normserve.engine.pending_jobs import OnEnd, PendingJobs
from normserve.errors import (
    ClientLeftError,
    DeviceFailureError,
    DrainingError,
    NormserveError,
    NotReadyError,
)
from normserve.jobs.device_description import DeviceDescription
from normserve.jobs.job import Batch, BatchResult, NormJob, Op, ReplaySlot
from normserve.memory.device_segments import ShareableDevice
from normserve.memory.tensors import HostTensor
from normserve.metrics.metrics import Metrics

log = logging.getLogger(__name__)


class EngineState(Enum):
    """The states of the engine; it takes requests while it is ready or retiring.

    Retiring is the time between the signal that ends the server and the drain: load balancers see that the server
    is not ready, and send requests elsewhere.
    """

    STARTING = "starting"
    READY = "ready"
    RETIRING = "retiring"
    DRAINING = "draining"
    FAILED = "failed"


class Engine:
    """The service that queues submitted jobs, launches them in batches and returns their results.

    Attributes:
        launch_progress: of the batches that the dispatcher has in flight or had.
        failed_launch: the description of the launch that failed with the device; None if it was no launch.
    """

    def __init__(
        self, executor: Executor, batcher: Batcher, compilation: CompilationQueue, metrics: Metrics
    ) -> None:
        self._executor = executor
        self._batcher = batcher
        self._compilation_queue = compilation
        self._metrics = metrics
        self._pending_jobs = PendingJobs(self._remove_job)
        self._new_jobs: dict[NormJob, bool] = {}
        self._dispatcher = LaunchDispatcher(executor, self._end_launch, self._launch_waiting)
        self.launch_progress = self._dispatcher.progress
        self.state = EngineState.STARTING
        self.device_description: DeviceDescription | None = None
        self.failed_launch: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        metrics.track_queue(lambda: len(batcher) + len(compilation))

    @property
    def backend_name(self) -> str:
        """The name of the backend; an empty string before its start."""
        return "" if self.device_description is None else self._executor.backend.name

    @property
    def last_error(self) -> str:
        """The traceback of the last error that no request caused; an empty string without one."""
        return self._executor.last_error

    async def start(self) -> DeviceDescription:
        """Start the device and return its description; jobs are accepted only after `accept_jobs`.

        Raises:
            NormserveError: the device cannot be used.
        """
        device = await self._run_on_executor(self._executor.start)
        assert isinstance(device, DeviceDescription)
        self.device_description = device
        backend = self._executor.backend
        self._compilation_queue.add_compiled(backend.compiled_classes or ())
        self._metrics.track_device(backend.name, device, backend.read_memory_bytes)
        return device

    def accept_jobs(self) -> None:
        """Accept jobs from now on."""
        if self.state is EngineState.STARTING:
            self._set_state(EngineState.READY)

    def start_retiring(self) -> None:
        """Report that the server is not ready, and still accept jobs until `start_draining` is called."""
        self._set_state(EngineState.RETIRING)

    def start_draining(self) -> None:
        """Accept no more jobs; those already admitted are finished."""
        if self.state is not EngineState.FAILED:
            self._set_state(EngineState.DRAINING)

    def fail_pending_jobs(self) -> None:
        """Fail all jobs whose callers still wait, because the server ends first."""
        self._pending_jobs.fail_all(DrainingError("the server ends before this request was finished"))

    @property
    def is_running(self) -> bool:
        """Whether any thread of the executor is alive, computing or idle."""
        return self._executor.is_running

    def stop(self, timeout_s: float) -> None:
        """End the executor's threads; nothing may be submitted afterwards."""
        self._executor.stop(timeout_s)

    def require_ready(self, *, is_call_in_progress: bool = False) -> None:
        """Raise an error unless the engine accepts jobs; which one depends on the engine's state.

        Args: is_call_in_progress: the job belongs to a call that began before, which a drain lets finish.

        Raises:
            NotReadyError, DrainingError: by state.
        """
        match self.state:
            case EngineState.READY | EngineState.RETIRING:
                return
            case EngineState.STARTING:
                raise NotReadyError("the server is still warming up")
            case EngineState.DRAINING:
                if is_call_in_progress:
                    return
                raise DrainingError("the server is shutting down and finishes only what it has admitted")
            case EngineState.FAILED:
                raise _make_not_launched_error()

    def require_available(self) -> None:
        """Raise an error unless load balancers may choose this server: it accepts jobs, and is not about to end.

        Raises:
            NotReadyError, DrainingError: by state.
        """
        if self.state is EngineState.RETIRING:
            raise DrainingError("the server is about to shut down; until then it still accepts requests")
        self.require_ready()

    async def load_parameters(self, op: Op, weight: HostTensor, bias: HostTensor | None) -> object:
        """Load a layer's weight and bias into the backend's memory; return the backend's handle for them.

        Raises:
            NormserveError: the device could not take them.
        """
        return await self._run_on_executor(lambda reply: self._executor.submit_parameters(op, weight, bias, reply))

    def register_host_memory(self, memory: memoryview) -> object:
        """Prepare memory that clients on this host share, so that copies between it and the device are fast.

        It stays prepared for as long as the returned object lives.  Called from any thread, once the
        engine is ready.
        """
        return self._executor.backend.register_host_memory(memory)

    @property
    def shareable_device(self) -> ShareableDevice | None:
        """The device whose memory can be shared with clients on this host; None if the backend has none.

        Read once the engine is ready.
        """
        return self._executor.backend.shareable_device

    def make_replayer(self) -> LaunchReplayer | None:
        """Make an object that answers repeated requests by running captured launches again, instead of queueing
        jobs with `submit`.

        Return None if the backend captures no launches.  Called once the engine is ready.
        """
        return self._executor.backend.make_replayer()

    def is_better_unbatched(self, job: NormJob) -> bool:
        """Return whether recurring jobs like this one are best computed one by one, in their client's memory."""
        return self._executor.backend.is_better_unbatched(job)

    def get_captured_launch(self, replay_slot: ReplaySlot) -> CapturedLaunch | None:
        """Return the captured launch of recurring jobs, or None if there is none."""
        return self._executor.backend.get_captured_launch(replay_slot)

    @property
    def can_replay(self) -> bool:
        """Whether captured launches may be replayed now, on this thread."""
        return self.state in (EngineState.READY, EngineState.RETIRING) and not self._dispatcher.is_launching

    def record_failed_replay(self, code: int) -> NormserveError:
        """Record that running a captured launch again has failed, which means that the device has failed.  Return
        the error for the caller.

        Args: code: the error code of the CUDA driver.
        """
        error = self._executor.translate_error(RuntimeError(f"CUDA error: {code}, of a captured launch"))
        self._fail_on_device_error(error)
        return error

    def submit(self, job: NormJob, start_deadline: float, on_end: OnEnd) -> None:
        """Queue a job and return; `on_end` is called later with its result or error.

        The caller calls `release` after `on_end`, or when the result is not wanted any more.

        Args:
            start_deadline: when execution must have begun, by `time.perf_counter`.
            on_end: called with the result or the error, after this call has returned.

        Raises:
            DeadlineExceededError: the deadline has passed.
            NormserveError: the job cannot be run; `release` must not be called.
        """
        if self.state is EngineState.FAILED:
            raise _make_not_launched_error()
        self._pending_jobs.add(job, start_deadline, on_end)
        try:
            is_compiled = self._ensure_compiled(job)
        except NormserveError:
            self.release(job)
            raise
        if not self._new_jobs:
            # At the end of this iteration of the loop: other jobs of the iteration share the launch, without a
            # wait.
            asyncio.get_running_loop().call_soon(self._admit_new_jobs)
        self._new_jobs[job] = is_compiled

    def release(self, job: NormJob) -> None:
        """Forget a job's caller, and remove the job from the queue if it has not run."""
        if not self._pending_jobs.remove(job):
            self._remove_job(job)

    def cancel(self, job: NormJob) -> None:
        """Remove a queued job whose client has left, and end it with an error; a running job still gets its
        result.
        """
        if self._pending_jobs.is_running(job):
            return
        self._remove_job(job)
        self._pending_jobs.fail((job,), ClientLeftError("the client left before its result was ready"))

    def _ensure_compiled(self, job: NormJob) -> bool:
        """Return whether a job's kernels are compiled; if not, queue the job and start the compilation if needed.

        Raises:
            OverloadedError: too much is being compiled.
        """
        if self._executor.backend.compiled_classes is None or not len(job.x.data):
            # Nothing is launched for a job without elements.
            return True
        if job.replay_slot is not None and job.replay_slot.prepared is not None:
            # An equal job has run.
            return True
        kind = job.compute_kernel_class()
        if kind in self._compilation_queue:
            return True
        if self._compilation_queue.add_waiting_job(kind, job):
            self._executor.submit_compilation(job, make_loop_reply(functools.partial(self._end_compilation, kind)))
        return False

    def _end_compilation(self, kernel_class: Hashable, outcome: WorkOutcome) -> None:
        """Queue and launch the jobs that waited for a compilation, or fail them with its error."""
        jobs = self._compilation_queue.end_compilation_and_take_jobs(
            kernel_class, has_succeeded=outcome.error is None
        )
        if outcome.error is not None:
            self._fail_on_device_error(outcome.error)
            self._pending_jobs.fail(jobs, outcome.error)
            return
        self._metrics.observe_compile(time.perf_counter() - outcome.started_at)
        for job in jobs:
            self._batcher.add(job)
        self._launch_waiting()

    def _admit_new_jobs(self) -> None:
        """Launch or queue the jobs submitted in this iteration of the event loop; start the deadline timers
        of those that wait.
        """
        if len(self._new_jobs) == 1 and self.state is not EngineState.FAILED:
            self._admit_single_job(*self._new_jobs.popitem())
            return
        # Some may have left since.
        arrivals = {job: ready for job, ready in self._new_jobs.items() if self._pending_jobs.is_pending(job)}
        self._new_jobs = {}
        if self.state is EngineState.FAILED:
            self._pending_jobs.fail(arrivals, _make_not_launched_error())
            return
        for job, is_compiled in arrivals.items():
            if is_compiled:
                self._batcher.add(job)
        self._launch_waiting()
        for job in arrivals:
            self._pending_jobs.begin_deadline_timer(job)

    def _admit_single_job(self, job: NormJob, is_compiled: bool) -> None:
        """Launch the only new job at once if no other waits and the device has capacity; else queue it.

        A single job is the usual case, and this avoids a search for others of its class.
        """
        if not self._pending_jobs.is_pending(job):
            return
        if is_compiled:
            lane = self._batcher.choose_lane(job)
            if not self._batcher and self._dispatcher.has_capacity(lane):
                self._launch_batch(Batch((job,), lane))
            else:
                self._batcher.add(job)
                self._launch_waiting()
        self._pending_jobs.begin_deadline_timer(job)

    def _launch_waiting(self) -> None:
        """Launch batches of waiting jobs for as long as the device has capacity."""
        while self.state is not EngineState.FAILED:
            batch = self._batcher.take_batch(self._dispatcher.list_free_lanes())
            if batch is None:
                return
            self._launch_batch(batch)

    def _launch_batch(self, batch: Batch) -> None:
        """Launch a batch and record that its jobs run; if it has ended already, give its callers the results."""
        self._pending_jobs.record_start(batch)
        outcome = self._dispatcher.launch(batch)
        if outcome is not None:
            self._resolve_batch(batch, outcome)

    def _end_launch(self, batch: Batch, outcome: WorkOutcome) -> None:
        self._resolve_batch(batch, outcome)
        self._launch_waiting()

    def _resolve_batch(self, batch: Batch, outcome: WorkOutcome) -> None:
        """Give the callers of a batch its results, or the error of its launch; a failed device fails the engine."""
        if outcome.error is not None:
            self._fail_on_device_error(outcome.error, batch)
            self._pending_jobs.fail(batch.jobs, outcome.error)
            return
        execution = outcome.value
        assert isinstance(execution, BatchResult)
        self._pending_jobs.resolve(batch, execution, outcome.started_at)
        # No caller waits for this.
        self._metrics.observe_launch(batch, execution)

    def _fail_on_device_error(self, error: NormserveError, batch: Batch | None = None) -> None:
        """Fail the engine if an error is a failure of the device: refuse the waiting jobs, and notify the process.

        Other errors are ignored.  Only jobs of a launch that failed get the device's error: one of them
        may be its cause, and would make the next server fail.  Jobs that were in no launch may be sent
        again.
        """
        if not isinstance(error, DeviceFailureError) or self.state is EngineState.FAILED:
            return
        self.failed_launch = None if batch is None else describe_batch(batch)
        self._set_state(EngineState.FAILED)
        log.critical("the device failed, the server ends: %s", error.detail)
        queued = (*self._batcher, *self._compilation_queue.list_jobs())
        for job in queued:
            self._remove_job(job)
        self._pending_jobs.fail(queued, _make_not_launched_error())
        self.on_failure()

    def _remove_job(self, job: NormJob) -> None:
        self._batcher.discard(job)
        self._compilation_queue.discard_job(job)

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        self._metrics.set_ready(state is EngineState.READY)

    async def _run_on_executor(self, request: Callable[[Reply], None]) -> object:
        """Start work on the executor and wait for its reply; return the value or raise the error.

        Args: request: starts the work with the callback.
        """
        future: asyncio.Future[WorkOutcome] = asyncio.get_running_loop().create_future()
        request(make_loop_reply(lambda outcome: None if future.done() else future.set_result(outcome)))
        outcome = await future
        if outcome.error is not None:
            self._fail_on_device_error(outcome.error)
            raise copy.copy(outcome.error)
        return outcome.value


def _make_not_launched_error() -> NotReadyError:
    """Make the error of a job that was not given to the device before this failed."""
    return NotReadyError("the device has failed before it was given this request, and the server is about to exit")
