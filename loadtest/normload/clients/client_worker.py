"""One client process: it receives commands from its parent through a pipe, and responds with tallies."""

import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

from normserve.client.http.server_address import ServerAddress

from normload.adapters.registry import ADAPTERS
from normload.clients.prepared_requests import prepare_request
from normload.clients.request_sender import RequestSender
from normload.clients.response_checker import ResponseChecker
from normload.load.request_cases import RequestCase
from normload.load.scenarios import LoadPhase
from normload.load.schedules import ArrivalGenerator, ClosedLoopSchedule, OpenLoopSchedule, RequestSchedule
from normload.measurements.tallies import OK, PhaseTally, RequestOutcome


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The configuration of one client process.

    Attributes:
        url, adapter, api_key, timeout_s: of the server.
        cases: the pool, with the relative frequency of each.
        seed: of the order, and of the choice of responses to check.
        checked_fraction: fraction of responses to check, from 0 to 1.
        index, processes: this process's index, and the number of processes.
    """

    url: str
    adapter: str
    api_key: str | None
    timeout_s: float
    cases: Sequence[tuple[RequestCase, float]]
    seed: int
    checked_fraction: float
    index: int
    processes: int


@dataclass(frozen=True, slots=True)
class SendEachOnceCommand:
    """A command to a client process: send each request of the pool once, as a warm-up."""


@dataclass(frozen=True, slots=True)
class SendSegmentCommand:
    """A command to a client process: send its share of a segment, which is a series of phases without a pause.

    Attributes:
        segment_number: the segment's number in the run, from which its random choices are seeded.
        phases: with their rates in requests per second, of all processes together.
        start: of the first phase, by `time.perf_counter`, which is the same in all processes of a machine.
        connections: number of connections of this process.
        grace_s: how long after the last phase late requests are still sent.
    """

    segment_number: int
    phases: tuple[LoadPhase, ...]
    start: float
    connections: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class StopSegmentCommand:
    """A command to a client process: send no more requests, because the run ends early."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The counts of a client process's requests that ended since its last report.

    Attributes:
        moved_bytes: of the bodies of successful requests and their responses.
    """

    requests: int
    errors: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command, as a client process sends it.  A process also sends one without tallies when it is
    ready.

    Attributes:
        tallies: of each phase.
        cpu_fraction: the fraction of a core that this process used.
    """

    tallies: list[PhaseTally]
    cpu_fraction: float


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A message from a client process that has failed and ends; `reason` is its exception."""

    reason: str


WorkerMessage: TypeAlias = CommandResult | LoadProgress | WorkerFailure
WorkerCommand: TypeAlias = SendEachOnceCommand | SendSegmentCommand | StopSegmentCommand
WorkerPipe: TypeAlias = "Connection[WorkerMessage, WorkerCommand | None]"
"""The worker's end of the pipe, with the types of the messages that it sends and receives."""


def main(
    setup: WorkerSetup,
    pipe: WorkerPipe,
) -> None:
    """Run a client process: execute the commands from the pipe until None arrives or the other end is closed.

    A first, empty `CommandResult` reports that the requests are created.  An exception ends the
    process, after a `WorkerFailure`.
    """
    try:
        worker = ClientWorker(setup)
        gc.collect()
        gc.freeze()
        pipe.send(CommandResult([], 0.0))
        while (command := pipe.recv()) is not None:
            if isinstance(command, SendEachOnceCommand):
                pipe.send(worker.send_and_check_each_once())
            elif isinstance(command, SendSegmentCommand):
                pipe.send(worker.send_segment(command, pipe))
    except EOFError:
        return
    except Exception as error:
        # The parent is gone if another process has failed before.
        with suppress(OSError):
            pipe.send(WorkerFailure(f"{type(error).__name__}: {error}"))


class ClientWorker:
    """The request pool and the connections of one client process, with the execution of its commands."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        adapter, address = ADAPTERS[setup.adapter](), ServerAddress.parse_url(setup.url)
        pool = [prepare_request(case, adapter, address, setup.api_key) for case, _ in setup.cases]
        self._sender = RequestSender(
            address,
            pool,
            ResponseChecker(adapter, pool),
            check_share=setup.checked_fraction,
            seed=setup.seed + setup.index,
            timeout_s=setup.timeout_s,
            api_key=setup.api_key,
        )

    def send_and_check_each_once(self) -> CommandResult:
        """Send each request of the pool once, to warm up the connections and the server; check every response."""
        tally = PhaseTally(1.0)
        tally.add_records(self._sender.send_and_check_each_once())
        return CommandResult([tally], 0.0)

    def send_segment(
        self,
        command: SendSegmentCommand,
        pipe: WorkerPipe,
    ) -> CommandResult:
        """Send this process's share of a segment, and return the tally of each phase.

        Progress is reported through the pipe several times a second.  A `StopSegmentCommand` in the pipe ends
        the segment early.
        """
        starts = [command.start]
        for phase in command.phases[:-1]:
            starts.append(starts[-1] + phase.duration_s)
        tallies = [PhaseTally(phase.duration_s) for phase in command.phases]
        arrivals = self._make_schedule(command)

        def report() -> None:
            if pipe.poll():
                pipe.recv()
                arrivals.stop()
            pipe.send(self._tally_records(tallies))

        began, busy = time.perf_counter(), time.process_time()
        self._sender.send_segment(arrivals, command.connections, starts, report)
        cpu = (time.process_time() - busy) / (time.perf_counter() - began)
        self._tally_records(tallies)
        return CommandResult(tallies, cpu if command.connections else 0.0)

    def _make_schedule(self, command: SendSegmentCommand) -> RequestSchedule:
        """Make this process's schedule for a segment.

        For an open loop all processes compute one schedule, and each takes every n-th request.  For a
        closed loop each process has its own.
        """
        setup, (first, *_) = self._setup, command.phases
        shares = [share for _, share in setup.cases]
        if first.arrivals == "closed":
            # The order of requests depends on the responses, so processes cannot share one.
            draws = ArrivalGenerator((setup.seed, command.segment_number, setup.index), shares)
            return ClosedLoopSchedule(first, command.start, draws)
        draws = ArrivalGenerator((setup.seed, command.segment_number), shares)
        return OpenLoopSchedule(
            command.phases, command.start, command.grace_s, draws, (setup.index, setup.processes)
        )

    def _tally_records(self, tallies: Sequence[PhaseTally]) -> LoadProgress:
        """Add the records that are new since the last call to the tallies of their phases.  Return the counts of
        these requests as progress.
        """
        new_records = self._sender.take_records()
        by_phase: dict[int, list[RequestOutcome]] = {}
        for place, record in new_records:
            by_phase.setdefault(place, []).append(record)
        for place, records in by_phase.items():
            tallies[place].add_records(records)
        good = [record for _, record in new_records if record.code == OK]
        moved = sum(record.sent_bytes + record.received_bytes for record in good)
        return LoadProgress(len(new_records), len(new_records) - len(good), moved)
