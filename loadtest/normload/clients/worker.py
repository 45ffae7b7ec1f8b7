"""One client process: it receives commands from its parent through a pipe, and responds with tallies."""

import gc
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from normserve.client.http.address import Address

from normload.adapters.registry import ADAPTERS
from normload.clients.judge import Judge
from normload.clients.pool import make_request
from normload.clients.sender import Sender
from normload.load.arrivals import Arrivals, ClosedLoop, Draws, OpenLoop
from normload.load.cases import Case
from normload.load.scenario import Phase
from normload.measurements.tally import OK, Record, Tally


@dataclass(frozen=True, slots=True)
class Setup:
    """The configuration of a process.

    Attributes:
        url, adapter, api_key, timeout_s: of the server.
        cases: the pool, with the relative frequency of each.
        seed: of the order, and of the choice of responses to check.
        check_share: fraction of responses to check, from 0 to 1.
        index, processes: this process's index, and the number of processes.
    """

    url: str
    adapter: str
    api_key: str | None
    timeout_s: float
    cases: Sequence[tuple[Case, float]]
    seed: int
    check_share: float
    index: int
    processes: int


@dataclass(frozen=True, slots=True)
class AskAll:
    """Send every request once."""


@dataclass(frozen=True, slots=True)
class Load:
    """Send a segment.

    Attributes:
        number: of the segment, for its seed.
        phases: with their rates in requests per second, of all processes together.
        start: by time.perf_counter, which is the same in all processes of a machine.
        connections: number of connections of this process.
        grace_s: how long after the last phase late requests are still sent.
    """

    number: int
    phases: tuple[Phase, ...]
    start: float
    connections: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End the current segment."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress since the last report."""

    requests: int
    errors: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a command.

    Attributes:
        tallies: of each phase.
        cpu: the fraction of a core that this process used.
    """

    tallies: list[Tally]
    cpu: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The process failed."""

    reason: str


def main(setup: Setup, pipe: "Connection[Done | Progress | Failed, AskAll | Load | Stop | None]") -> None:
    """Execute commands from the pipe, until None arrives or its other end is closed."""
    # Ctrl-C reaches all processes of a terminal; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        worker = Worker(setup)
        gc.collect()
        gc.freeze()
        pipe.send(Done([], 0.0))
        while (command := pipe.recv()) is not None:
            if isinstance(command, AskAll):
                pipe.send(worker.send_all())
            elif isinstance(command, Load):
                pipe.send(worker.load(command, pipe))
    except EOFError:
        return
    except Exception as error:
        pipe.send(Failed(f"{type(error).__name__}: {error}"))


class Worker:
    """The state of a process between commands."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        adapter, address = ADAPTERS[setup.adapter](), Address.of(setup.url)
        pool = [make_request(case, adapter, address, setup.api_key) for case, _ in setup.cases]
        self._sender = Sender(
            address,
            pool,
            Judge(adapter, pool),
            check_share=setup.check_share,
            seed=setup.seed + setup.index,
            timeout_s=setup.timeout_s,
            api_key=setup.api_key,
        )

    def send_all(self) -> Done:
        """Send every request once, to warm up connections and the server."""
        tally = Tally(1.0)
        tally.add(self._sender.send_all())
        return Done([tally], 0.0)

    def load(
        self, command: Load, pipe: "Connection[Done | Progress | Failed, AskAll | Load | Stop | None]"
    ) -> Done:
        """Send a segment, and report the progress regularly."""
        starts = [command.start]
        for phase in command.phases[:-1]:
            starts.append(starts[-1] + phase.duration_s)
        tallies = [Tally(phase.duration_s) for phase in command.phases]
        arrivals = self._arrivals(command)

        def report() -> None:
            if pipe.poll():
                pipe.recv()
                arrivals.stop()
            pipe.send(self._fold(tallies))

        began, busy = time.perf_counter(), time.process_time()
        self._sender.run(arrivals, command.connections, starts, report)
        cpu = (time.process_time() - busy) / (time.perf_counter() - began)
        self._fold(tallies)
        return Done(tallies, cpu if command.connections else 0.0)

    def _arrivals(self, command: Load) -> Arrivals:
        setup, (first, *_) = self._setup, command.phases
        shares = [share for _, share in setup.cases]
        if first.arrivals == "closed":
            # The order of requests depends on the responses, so processes cannot share one.
            draws = Draws((setup.seed, command.number, setup.index), shares)
            return ClosedLoop(first, command.start, draws)
        draws = Draws((setup.seed, command.number), shares)
        return OpenLoop(command.phases, command.start, command.grace_s, draws, (setup.index, setup.processes))

    def _fold(self, tallies: Sequence[Tally]) -> Progress:
        taken = self._sender.take_records()
        by_phase: dict[int, list[Record]] = {}
        for place, record in taken:
            by_phase.setdefault(place, []).append(record)
        for place, records in by_phase.items():
            tallies[place].add(records)
        good = [record for _, record in taken if record.code == OK]
        moved = sum(record.sent_bytes + record.received_bytes for record in good)
        return Progress(len(taken), len(taken) - len(good), moved)
