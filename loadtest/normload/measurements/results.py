"""A finished run, and its JSON."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from normserve.client.quoting import sanitise_text

from normload.load.scenarios import ALL_PHASES, LoadPhase
from normload.load.toml_tables import is_number
from normload.measurements.load_sweep import LoadSweep, SweepPoint, evaluate_sweep
from normload.measurements.loopback_echo import LoopbackEcho
from normload.measurements.machine_use import PeakMachineUse
from normload.measurements.tallies import NOT_SENT, OK, PhaseTally, RequestTotals, compute_rate, format_error

FORMAT = "normload/1"

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(slots=True)
class PhaseResult:
    """The results of one phase in one cycle of the scenario.

    Attributes:
        phase: with its rate in requests per second.
        start_s: seconds since the run's first phase began.
        segment_s: from its start to the end of the last phase that follows without a pause; late
            responses until then count in the run's rate, but not in this phase's.
        tally: of its requests.
    """

    phase: LoadPhase
    start_s: float
    segment_s: float
    tally: PhaseTally


@dataclass(slots=True)
class PhaseSummary:
    """The summed results of all phases that have the same name; each cycle of the scenario has one.  The summary
    named 'all' sums every phase of the run.

    Attributes:
        name: of the phases; "all" for all phases.
        phases: one for each cycle.
        offered: the scenario's rate in requests per second; NaN for a closed loop.
        duration_s: sum over the phases.
        total: all requests.
        in_time: requests that ended within their phase, or the whole run; rates are computed from these.
    """

    name: str
    phases: Sequence[PhaseResult]
    offered: float = field(init=False)
    duration_s: float = field(init=False)
    total: RequestTotals = field(init=False)
    in_time: RequestTotals = field(init=False)

    def __post_init__(self) -> None:
        self.duration_s = sum(each.phase.duration_s for each in self.phases)
        due = sum(each.phase.rate * each.phase.duration_s for each in self.phases)
        is_closed = any(each.phase.arrivals == "closed" for each in self.phases)
        self.offered = math.nan if is_closed else compute_rate(due, self.duration_s)
        self.total, self.in_time = RequestTotals(), RequestTotals()
        for each in self.phases:
            self.total.merge(each.tally.sum_all())
            self.in_time.merge(each.tally.sum_in_time(within_s=self._get_limit_s(each)))

    @property
    def rate(self) -> float:
        """Successful requests per second; NaN without phases."""
        return compute_rate(self.in_time.ok, self.duration_s)

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second in both directions, of successful requests; NaN without phases."""
        return compute_rate(self.in_time.moved_bytes, self.duration_s)

    @property
    def errors(self) -> float:
        """The fraction of all requests that failed; NaN without requests."""
        return self.total.errors / self.total.requests if self.total.requests else math.nan

    def sum_operation(self, operation: str) -> tuple[RequestTotals, RequestTotals]:
        """Return two sums of one operation's requests: of all of them, and of those that ended within their phase.

        The summary of all phases also counts late responses, up to the end of each segment.
        """
        total, in_time = RequestTotals(), RequestTotals()
        for each in self.phases:
            total.merge(each.tally.sum_all(operation))
            in_time.merge(each.tally.sum_in_time(operation, self._get_limit_s(each)))
        return total, in_time

    def _get_limit_s(self, phase: PhaseResult) -> float:
        return phase.segment_s if self.name == ALL_PHASES else phase.phase.duration_s


@dataclass(slots=True)
class RunResult:
    """The results of a run, as they are written to JSON.

    Attributes:
        scenario, description, seed: of the run.
        url, adapter, server: the last is `/v1/info`, empty if the server has none.
        started: date and time, ISO 8601.
        processes, connections: of the client.
        cpu: the greatest fraction of a core that each client process used.
        machine: how busy the client's machine was; None if that is not known.
        echo: the upper bound by the loopback; None if the server is on another machine.
        capacity: successful requests per second of the closed loop that relative rates refer to; None
            without relative rates.
        apart: requests by status and code that do not count: warm-up and measurement of the capacity.
        phases: in chronological order.
        checked, wrong, faults: results of checked responses, in and before the phases.
        remarks: what a reader should know before using a number.
    """

    scenario: str
    description: str
    seed: int
    url: str
    adapter: str
    server: Mapping[str, Any]
    started: str
    processes: int
    connections: int
    cpu: Sequence[float]
    machine: PeakMachineUse | None
    echo: LoopbackEcho | None
    capacity: float | None
    apart: Counter[tuple[int, str]]
    phases: list[PhaseResult]
    checked: int
    wrong: int
    faults: list[str]
    remarks: list[str]

    @property
    def all_phases(self) -> PhaseSummary:
        """All phases together."""
        return PhaseSummary(ALL_PHASES, self.phases)

    def summarise_phases(self) -> list[PhaseSummary]:
        """Summarise phases by name, in the order of their first start."""
        names = dict.fromkeys(each.phase.name for each in self.phases)
        return [PhaseSummary(name, [each for each in self.phases if each.phase.name == name]) for name in names]

    def list_operations(self) -> list[str]:
        """List the operations of the workload, sorted."""
        return sorted({operation for each in self.phases for operation in each.tally.list_operations()})

    def count_sent_by_status(self) -> Counter[int]:
        """Count, for each HTTP status, the requests that were sent, including those of the warm-up.  Status 0
        counts requests without a response.
        """
        outcomes = self.apart + self.all_phases.total.outcomes
        counts: Counter[int] = Counter()
        for (status, code), count in outcomes.items():
            if code != NOT_SENT:
                counts[status] += count
        return counts

    @property
    def server_name(self) -> str:
        """The server's version, backend and device as a text; "" if the server has no `/v1/info`."""
        if not self.server:
            return ""
        device = self.server.get("device")
        name = device.get("name") if isinstance(device, dict) else None
        version, backend, name = (
            sanitise_text(each, 64) or "?"
            for each in (self.server.get("version"), self.server.get("backend"), name)
        )
        return f"normserve {version}, {backend} on {name}"

    @property
    def copy_bandwidth(self) -> float | None:
        """Bytes per second of a copy on the device; None if the server reports no valid number."""
        bandwidth = self.server.get("copy_bandwidth_bytes_per_second")
        return float(bandwidth) if is_number(bandwidth) and 0 < bandwidth < 1e18 else None

    def compute_kernel_bandwidth(self) -> float:
        """Compute bytes per second on the device, as reported by the server; NaN if it reports none."""
        total = self.all_phases.total
        return compute_rate(total.kernel_bytes, total.kernel_s)

    def find_sweep(self) -> LoadSweep | None:
        """Find the knee, the sustained load and the peak rate, by comparing the phases that send at a given rate.

        Return None if fewer than three different rates were answered.
        """
        parts = [part for part in self.summarise_phases() if not math.isnan(part.offered)]
        return evaluate_sweep(
            [
                SweepPoint(
                    part.name,
                    part.offered,
                    compute_rate(part.total.requests, part.duration_s),
                    part.rate,
                    part.total.latency.mean_s,
                    part.errors,
                )
                for part in parts
            ]
        )

    def write_json(self, file: Path) -> None:
        """Write the JSON."""
        file.write_text(json.dumps(self.to_json(), separators=(",", ":")) + "\n", encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """Convert the result to a JSON document.

        `summary` is for readers: it is derived from the other fields, and `from_json` ignores it.
        """
        sweep = self.find_sweep()
        return {
            "format": FORMAT,
            "summary": {
                "phases": [_make_summary(part) for part in [*self.summarise_phases(), self.all_phases]],
                "sent_by_status": {
                    str(status): count for status, count in sorted(self.count_sent_by_status().items())
                },
                "kernel_bytes_per_second": _make_json_number(self.compute_kernel_bandwidth()),
                "sweep": None if sweep is None else asdict(sweep),
            },
            **{name: getattr(self, name) for name in _PLAIN},
            "cpu": list(self.cpu),
            "machine": None if self.machine is None else asdict(self.machine),
            "echo": None if self.echo is None else asdict(self.echo),
            "apart": [[status, code, count] for (status, code), count in self.apart.items()],
            "phases": [
                {
                    "phase": asdict(each.phase),
                    "start_s": each.start_s,
                    "segment_s": each.segment_s,
                    "tally": each.tally.to_json(),
                }
                for each in self.phases
            ],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Make a result from a document of `to_json`."""
        return cls(
            **{name: document[name] for name in _PLAIN},
            cpu=document["cpu"],
            machine=None if document.get("machine") is None else PeakMachineUse(**document["machine"]),
            echo=None if document["echo"] is None else LoopbackEcho(**document["echo"]),
            apart=Counter({(status, code): count for status, code, count in document["apart"]}),
            phases=[
                PhaseResult(
                    LoadPhase(**each["phase"]),
                    each["start_s"],
                    each["segment_s"],
                    PhaseTally.from_json(each["tally"]),
                )
                for each in document["phases"]
            ],
        )


_PLAIN = (
    *("scenario", "description", "seed", "url", "adapter", "server", "started"),
    *("processes", "connections", "capacity", "checked", "wrong", "faults", "remarks"),
)


def read_result(file: Path) -> RunResult:
    """Read a run's result from its JSON file.

    Raises:
        ValueError: the file contains no result.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: must be the JSON that `normload run --json` writes: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{file}: this is not a result of normload: its format must be {FORMAT}")
    try:
        return RunResult.from_json(document)
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, IndexError):
        raise ValueError(f"{file}: this is not a complete result of normload") from None


def _make_summary(part: PhaseSummary) -> dict[str, Any]:
    """Make the main numbers of a phase, or of all phases, for people who read the JSON."""
    latency = part.total.latency
    return {
        "name": part.name,
        "offered_per_second": _make_json_number(part.offered),
        "duration_s": part.duration_s,
        "requests": part.total.requests,
        "ok_per_second": _make_json_number(part.rate),
        "bytes_per_second": _make_json_number(part.bytes_per_second),
        "latency_s": {
            f"p{percent:g}": _make_json_number(latency.compute_percentile_s(percent)) for percent in PERCENTILES
        }
        | {"max": latency.max_s, "mean": _make_json_number(latency.mean_s)},
        "errors": {
            format_error(status, code): count for (status, code), count in part.total.outcomes.items() if code != OK
        },
    }


def _make_json_number(value: float) -> float | None:
    """Convert NaN, which JSON does not have, to None."""
    return None if math.isnan(value) else value
