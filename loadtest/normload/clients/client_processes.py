"""The client processes, controlled by their parent."""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Self

from normload.clients import client_worker
from normload.clients.client_worker import (
    CommandResult,
    LoadProgress,
    SendEachOnceCommand,
    SendSegmentCommand,
    StopSegmentCommand,
    WorkerFailure,
    WorkerSetup,
)
from normload.interrupts import block_interrupts_of_children
from normload.load.scenarios import LoadPhase
from normload.measurements.tallies import PhaseTally

# Time until every process has read its command and started its threads.
_HEAD_START_S = 0.15
_END_S = 5.0

_ENDED = "a client process ended unexpectedly"


class ClientProcessError(RuntimeError):
    """The failure or the unexpected end of a client process."""


class ClientProcesses:
    """The client processes that together send a scenario's load; a context manager.

    They start with this object, and end with its `with` block.
    """

    def __init__(self, setup: WorkerSetup, on_progress: Callable[[LoadProgress], None]) -> None:
        """Args:
        setup: of every process, except for its index; it has the number of processes.
        on_progress: receives the progress.
        """
        self.processes = setup.processes
        #: The greatest fraction of a core that each process used in any segment.
        self.cpu = [0.0] * setup.processes
        #: How many cores all processes together used in the last segment.
        self.cores_used = 0.0
        self._on_progress = on_progress
        self._segments = 0
        self._stopped = False
        context = multiprocessing.get_context("spawn")
        self._pipes: list[
            Connection[
                SendEachOnceCommand | SendSegmentCommand | StopSegmentCommand | None,
                CommandResult | LoadProgress | WorkerFailure,
            ]
        ] = []
        self._running = []
        for index in range(setup.processes):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=client_worker.main,
                args=(replace(setup, index=index), theirs),
                daemon=True,
                name=f"normload-{index}",
            )
            with block_interrupts_of_children():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._running.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self._running:
            process.join(_END_S if kind is None else 0.1)
            if process.is_alive():
                process.kill()
                process.join()

    @property
    def is_stopped(self) -> bool:
        """Whether the run was ended early."""
        return self._stopped

    def wait_until_ready(self) -> None:
        """Return when every process has created its requests."""
        self._receive_results()

    def send_each_once(self) -> PhaseTally:
        """Make every process send every request once."""
        self._send_commands([SendEachOnceCommand()] * self.processes)
        return _merge_tallies_into_first(self._receive_results())[0]

    def send_phases(
        self, phases: tuple[LoadPhase, ...], connections: int, grace_s: float
    ) -> tuple[float, list[PhaseTally]]:
        """Have all processes send consecutive phases, and wait for their results.

        Return the start of the first phase, by `time.perf_counter`, and for each phase a tally of all
        processes.

        Args:
            phases: with their rates in requests per second, of all processes together.
            connections: number of connections, divided evenly among the processes.
            grace_s: how long after the last phase late requests are still sent.

        Raises:
            ClientProcessError: a process failed or ended.
        """
        start = time.perf_counter() + _HEAD_START_S
        self._segments += 1
        counts = split_evenly(connections, self.processes)
        self._send_commands([SendSegmentCommand(self._segments, phases, start, count, grace_s) for count in counts])
        done = self._receive_results()
        self.cpu = [max(before, each.cpu_fraction) for before, each in zip(self.cpu, done, strict=True)]
        self.cores_used = sum(each.cpu_fraction for each in done)
        return start, _merge_tallies_into_first(done)

    def stop_run(self) -> None:
        """Make all processes end the current phases early, and set `is_stopped`.  Nothing more may be sent
        afterwards.
        """
        self._stopped = True
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(StopSegmentCommand())

    def _send_commands(self, commands: Sequence[SendEachOnceCommand | SendSegmentCommand]) -> None:
        """Send each process its own command.

        Raises:
            ClientProcessError: a process has ended.
        """
        for pipe, command in zip(self._pipes, commands, strict=True):
            try:
                pipe.send(command)
            except OSError:
                raise ClientProcessError(_ENDED) from None

    def _receive_results(self) -> list[CommandResult]:
        """Wait for one result from every process; return them in the order of the processes.

        Reports of progress that arrive before are passed to `on_progress`.

        Raises:
            ClientProcessError: a process failed or ended.
        """
        done: dict[int, CommandResult] = {}
        while len(done) < self.processes:
            waiting = {pipe: index for index, pipe in enumerate(self._pipes) if index not in done}
            for ready in wait(list(waiting)):
                assert isinstance(ready, Connection)
                try:
                    message = ready.recv()
                except (EOFError, OSError):
                    raise ClientProcessError(_ENDED) from None
                if isinstance(message, WorkerFailure):
                    raise ClientProcessError(message.reason)
                if isinstance(message, LoadProgress):
                    self._on_progress(message)
                else:
                    done[waiting[ready]] = message
        return [done[index] for index in range(self.processes)]


def split_evenly(count: int, parts: int) -> list[int]:
    """Split a count as evenly as possible."""
    return [count // parts + (index < count % parts) for index in range(parts)]


def _merge_tallies_into_first(results: Sequence[CommandResult]) -> list[PhaseTally]:
    """Merge the tallies of all processes, phase by phase, into those of the first process, and return these."""
    first, *others = results
    for other in others:
        for tally, more in zip(first.tallies, other.tallies, strict=True):
            tally.merge(more)
    return first.tallies
