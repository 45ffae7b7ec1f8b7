"""A whole run: warm-up, measurement of the upper bounds and of the capacity, the phases, the result."""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from normserve.client import Client, RetryPolicy
from normserve.client.http.server_address import ServerAddress

from normload.adapters.registry import ADAPTERS
from normload.clients.client_processes import ClientProcesses
from normload.clients.client_worker import LoadProgress, WorkerSetup
from normload.clients.prepared_requests import check_supported
from normload.load.scenarios import LoadPhase, LoadScenario
from normload.measurements.loopback_echo import LoopbackEcho, measure_echo, resolves_to_loopback
from normload.measurements.machine_use import PeakMachineUse, count_available_cores, read_available_cores_cpu_times
from normload.measurements.remarks import list_remarks
from normload.measurements.results import PhaseResult, RunResult
from normload.measurements.tallies import MAX_FAULTS, PhaseTally

#: The fraction of responses that is checked by default.
SAMPLE = 0.02

_MAX_PROCESSES = 8
_MIN_GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class TargetServer:
    """The server that receives the load, with its protocol, key and timeout.

    Attributes:
        url: where it listens; for adapters other than normserve's with the path that takes tensors.
        adapter: its protocol, a key of `ADAPTERS`.
        api_key: sent as a bearer token.
        timeout_s: longest time of a request.
    """

    url: str
    adapter: str = "normserve"
    api_key: str | None = None
    timeout_s: float = 60.0

    def fetch_info(self) -> Mapping[str, Any]:
        """Fetch the server's `/v1/info`; return an empty mapping for other servers than normserve.

        Raises:
            ClientError: it does not respond.
        """
        if self.adapter != "normserve":
            return {}
        retries = RetryPolicy(tries=1)
        with Client(self.url, api_key=self.api_key, timeout_s=self.timeout_s, retries=retries) as client:
            return client.info()


class RunObserver:
    """A receiver of a run's progress, such as a progress bar; this base class ignores it."""

    def begin_stage(self, name: str, duration_s: float | None) -> None:
        """Observe the begin of a stage; its duration is None if not known."""

    def add_progress(self, progress: LoadProgress) -> None:
        """Observe that requests have ended."""

    def set_stop(self, stop: Callable[[], None]) -> None:
        """Store a function that ends the run early, with the result so far."""


def choose_process_count(connections: int) -> int:
    """Choose half of the cores that this process may use, at least two, but at most one per connection."""
    return max(1, min(connections, _MAX_PROCESSES, max(2, len(os.sched_getaffinity(0)) // 2)))


def run_scenario(
    scenario: LoadScenario,
    target: TargetServer,
    *,
    seed: int,
    processes: int | None = None,
    verify: bool = False,
    watcher: RunObserver | None = None,
) -> RunResult:
    """Run a scenario against a server: warm up, measure upper bounds and capacity, send the phases.

    Args:
        scenario: the workload and its phases.
        target: the server.
        seed: of all random choices.
        processes: the number of client processes; None for the default.
        verify: check every response, and not a sample.
        watcher: receives the progress.

    Raises:
        ScenarioError: the adapter does not support a request of the scenario.
        ClientError: the server does not respond at the start.
        ClientProcessError: a client process failed.
    """
    watcher = watcher or RunObserver()
    address, cases = ServerAddress.parse_url(target.url), scenario.workload.draw_cases(seed)
    check_supported(ADAPTERS[target.adapter](), [case for case, _ in cases], address)
    info = target.fetch_info()
    most = max(phase.connections or scenario.connections for phase in scenario.phases)
    setup = WorkerSetup(
        target.url,
        target.adapter,
        target.api_key,
        target.timeout_s,
        cases,
        seed,
        1.0 if verify else SAMPLE,
        0,
        processes or choose_process_count(most),
    )
    started = datetime.now(UTC).isoformat(timespec="seconds")
    watcher.begin_stage("making requests", None)
    with ClientProcesses(setup, watcher.add_progress) as fleet:
        watcher.set_stop(fleet.stop_run)
        fleet.wait_until_ready()
        conductor = _ScenarioRun(scenario, fleet, watcher)
        conductor.warm_up()
        echo = conductor.measure_echo(address)
        conductor.run_phases()
    return conductor.make_result(target, seed, info, started, most, echo)


class _ScenarioRun:
    """The stages of one run of a scenario, with the results so far."""

    def __init__(self, scenario: LoadScenario, fleet: ClientProcesses, watcher: RunObserver) -> None:
        self._scenario = scenario
        self._fleet = fleet
        self._watcher = watcher
        self._uncounted_tallies: list[PhaseTally] = []
        self._phases: list[PhaseResult] = []
        self._capacity: float | None = None
        self._machine: PeakMachineUse | None = None

    def warm_up(self) -> None:
        """Send every request once, unless the run was ended before."""
        if self._fleet.is_stopped:
            return
        self._watcher.begin_stage("sending every request once", None)
        self._uncounted_tallies.append(self._fleet.send_each_once())

    def measure_echo(self, address: ServerAddress) -> LoopbackEcho | None:
        """Measure the loopback's bandwidth for messages of the load's mean size, as an upper bound for the
        server's.

        Return None if the server is on another machine or shares memory, if no request of the warm-up or the
        measurement itself succeeded, or if the run was ended before.
        """
        if self._fleet.is_stopped:
            return None
        is_unix = address.socket_path is not None
        total = self._uncounted_tallies[0].sum_all()
        # With shared memory, no tensors pass through sockets.
        if address.is_shared_memory or not total.ok or not (is_unix or resolves_to_loopback(address.host)):
            return None
        self._watcher.begin_stage("measuring the loopback", None)
        with suppress(OSError, EOFError):
            nbytes = max(1, total.moved_bytes // total.ok // 2)
            return measure_echo(nbytes, self._fleet.processes, is_unix=is_unix)
        return None

    def run_phases(self) -> None:
        """Warm up with the first phase's load, then run all phases.  If a phase's rate is relative to the capacity,
        measure the capacity first.

        Return early if the run was stopped or the capacity is 0.
        """
        scenario = self._scenario
        if self._fleet.is_stopped:
            return
        if scenario.needs_capacity:
            self._measure_capacity()
        segments = [
            tuple(phase.resolve_rate(self._capacity or 0.0) for phase in each) for each in scenario.list_segments()
        ]
        if self._capacity == 0 or self._fleet.is_stopped:
            return
        if scenario.warmup_s:
            first = replace(segments[0][0], duration_s=scenario.warmup_s)
            self._uncounted_tallies += self._send_segment("warming up", (first,))[1]
        began: float | None = None
        for number, segment in enumerate(segments):
            if self._fleet.is_stopped:
                return
            if number and scenario.settle_s:
                time.sleep(scenario.settle_s)
            before = read_available_cores_cpu_times()
            names = dict.fromkeys(phase.name for phase in segment)
            start, tallies = self._send_segment(", ".join(names), segment)
            ended = time.perf_counter() if self._fleet.is_stopped else math.inf
            after = read_available_cores_cpu_times()
            if before is not None and after is not None:
                self._update_peak_machine_use(after.compute_busy_fraction(before))
            began = start if began is None else began
            end = min(ended, start + sum(phase.duration_s for phase in segment))
            for phase, tally in zip(segment, tallies, strict=True):
                if start < ended:
                    # Rates and plots of a run that was ended early are of the time in which it ran.
                    sent_phase = replace(phase, duration_s=min(phase.duration_s, ended - start))
                    self._phases.append(PhaseResult(sent_phase, start - began, end - start, tally))
                start += phase.duration_s

    def make_result(
        self,
        target: TargetServer,
        seed: int,
        info: Mapping[str, Any],
        started: str,
        connections: int,
        echo: LoopbackEcho | None,
    ) -> RunResult:
        """Make the run's result, with its remarks, from all tallies so far."""
        tallies = [*self._uncounted_tallies, *(each.tally for each in self._phases)]
        apart: Counter[tuple[int, str]] = Counter()
        for tally in self._uncounted_tallies:
            apart.update(tally.sum_all().outcomes)
        result = RunResult(
            scenario=self._scenario.name,
            description=self._scenario.description,
            seed=seed,
            url=target.url,
            adapter=target.adapter,
            server=info,
            started=started,
            processes=self._fleet.processes,
            connections=connections,
            cpu=self._fleet.cpu,
            machine=self._machine,
            echo=echo,
            capacity=self._capacity,
            apart=apart,
            phases=self._phases,
            checked=sum(tally.checked for tally in tallies),
            wrong=sum(tally.wrong for tally in tallies),
            faults=[fault for tally in tallies for fault in tally.faults][:MAX_FAULTS],
            remarks=[],
        )
        result.remarks += list_remarks(result, stopped=self._fleet.is_stopped)
        return result

    def _update_peak_machine_use(self, busy_fraction: float) -> None:
        """Keep the CPU use of the segment that just ended if the machine was busier than in all earlier segments.

        Args:
            busy_fraction: fraction of the machine's CPU time that was used, by any process.
        """
        if self._machine is None or busy_fraction > self._machine.busy:
            cores = count_available_cores()
            self._machine = PeakMachineUse(cores, busy_fraction, self._fleet.cores_used / cores)

    def _measure_capacity(self) -> None:
        """Run the closed loop that measures the server's capacity, and keep its successful requests per second."""
        phase = self._scenario.capacity
        (tally,) = self._send_segment("measuring the capacity", (phase,))[1]
        self._uncounted_tallies.append(tally)
        self._capacity = tally.sum_in_time().ok / phase.duration_s

    def _send_segment(self, name: str, segment: tuple[LoadPhase, ...]) -> tuple[float, list[PhaseTally]]:
        """Show the observer a new stage, and send a segment; return its start and the tally of each phase."""
        self._watcher.begin_stage(name, sum(phase.duration_s for phase in segment))
        connections = segment[0].connections or self._scenario.connections
        grace_s = max(_MIN_GRACE_S, self._scenario.settle_s or 0.0)
        return self._fleet.send_phases(segment, connections, grace_s)
