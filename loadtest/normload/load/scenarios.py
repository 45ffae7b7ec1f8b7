"""A scenario, read from TOML: the workload and its phases.

    description = "…"
    connections = 64            # maximum number of requests in flight of phases with a rate
    warmup_s = 2.0              # with the first phase's load, before the measurement
    settle_s = 0.5              # pause between phases; without it there is none
    cycles = 1                  # how often the phases are repeated

    [workload]                  # see `Workload`

    [capacity]                  # a closed loop at the start, for rates in per cent of its rate
    connections = 16
    duration_s = 3.0

    [[phases]]
    name = "steady"
    arrivals = "poisson"        # or "constant" or "closed"
    rate = "60%"                # or requests per second; a list makes a phase of each; not for "closed"
    connections = 8             # of "closed": number of requests in flight
    duration_s = 30.0

    [[objectives]]
    bound = "p99<20ms"          # as in --slo
    phase = "steady"            # or all phases
    operation = "layer_norm"    # or all operations

The values here are the defaults, except for the phases, the objectives and `settle_s`.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast, get_args

from normload.load.objectives import LoadObjective, parse_objective
from normload.load.toml_tables import MOST, ScenarioError, TomlTable, format_value, is_number
from normload.load.workload import Workload, read_workload

#: The name of the whole run in reports, which no phase may have.
ALL_PHASES = "all"

Arrivals = Literal["poisson", "constant", "closed"]

# The number of ports of an address.
_MOST_CONNECTIONS = 2**16
_MOST_CYCLES = 10_000


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """A period of a run with one kind of load: requests on a schedule, or a closed loop.

    Attributes:
        name: phases with the same name in several cycles are counted together.
        arrivals: "poisson" and "constant" send on a schedule that does not depend on responses,
            "closed" sends a request after the response to the previous one.
        duration_s: of the schedule.
        rate: of a schedule, in requests per second; with `of_capacity`, as a fraction of the capacity.
        of_capacity: whether the rate is relative to the measured capacity.
        connections: of a closed loop, requests in flight.
    """

    name: str
    arrivals: Arrivals
    duration_s: float
    rate: float = 0.0
    of_capacity: bool = False
    connections: int = 0

    def resolve_rate(self, capacity: float) -> "LoadPhase":
        """Return the phase with its rate in requests per second."""
        return replace(self, rate=self.rate * capacity, of_capacity=False) if self.of_capacity else self


@dataclass(frozen=True, slots=True)
class LoadScenario:
    """A parsed scenario: its requests, its phases, and settings such as the warm-up and the number of cycles.  The
    module's docstring explains the settings.
    """

    name: str
    description: str
    workload: Workload
    phases: tuple[LoadPhase, ...]
    connections: int = 64
    warmup_s: float = 2.0
    settle_s: float | None = None
    cycles: int = 1
    capacity: LoadPhase = LoadPhase("capacity", "closed", 3.0, connections=16)
    objectives: tuple[LoadObjective, ...] = ()

    def list_segments(self) -> list[tuple[LoadPhase, ...]]:
        """List the segments of a run: series of phases that are sent without a pause.

        All responses are awaited before the next segment.  A closed loop is a segment of its own.
        """
        found: list[tuple[LoadPhase, ...]] = []
        for phase in self.phases * self.cycles:
            follows = self.settle_s is None and phase.arrivals != "closed"
            if found and follows and found[-1][-1].arrivals != "closed":
                found[-1] += (phase,)
            else:
                found.append((phase,))
        return found

    @property
    def needs_capacity(self) -> bool:
        """Whether a rate is relative."""
        return any(phase.of_capacity for phase in self.phases)

    @property
    def duration_s(self) -> float:
        """Duration of all phases, without pauses."""
        return self.cycles * sum(phase.duration_s for phase in self.phases)

    def with_duration(self, duration_s: float) -> "LoadScenario":
        """Return the scenario with another total duration; each phase keeps its share."""
        factor = duration_s / self.duration_s
        phases = tuple(replace(phase, duration_s=phase.duration_s * factor) for phase in self.phases)
        return replace(self, phases=phases)


def load_built_in_scenarios() -> dict[str, LoadScenario]:
    """Read and parse all built-in scenarios; return them by name."""
    folder = resources.files("normload") / "scenarios"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return {
        (name := file.name.removesuffix(".toml")): parse_scenario(name, file.read_text("utf-8")) for file in files
    }


def load_scenario(name_or_path: str) -> LoadScenario:
    """Read and parse a scenario: a built-in one, given its name, or a file, given its path.

    Raises:
        ScenarioError: there is no such scenario, or it is not valid.
    """
    built_in = load_built_in_scenarios()
    if name_or_path in built_in:
        return built_in[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise ScenarioError(
            f"a scenario must be a file or one of {', '.join(built_in)}, got {format_value(name_or_path)}"
        )
    return parse_scenario(path.stem, _read_file(path))


def _read_file(path: Path) -> str:
    """Read the text of a scenario's file.

    Raises:
        ScenarioError: it is not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ScenarioError(f"{path.stem}: a scenario must be text in UTF-8, it is not") from None


def parse_scenario(name: str, text: str) -> LoadScenario:
    """Parse the TOML text of a scenario; the name also appears in messages.

    Raises:
        ScenarioError: it is not TOML, or not a valid scenario.
    """
    try:
        document = tomllib.loads(text)
    # Also ValueError for too many digits, RecursionError for too deeply nested arrays.
    except (ValueError, RecursionError) as error:
        raise ScenarioError(f"{name}: {error}") from None
    table = TomlTable(name, document)
    workload = read_workload(table.take_table("workload"))
    phases = tuple(phase for each in table.take_tables_or_empty("phases") for phase in _read_phases(each))
    scenario = LoadScenario(
        name=name,
        description=table.take_text("description", ""),
        workload=workload,
        phases=phases,
        connections=table.take_positive_count("connections", 64, _MOST_CONNECTIONS),
        warmup_s=table.take_nonnegative_seconds("warmup_s", 2.0),
        settle_s=table.take_nonnegative_seconds("settle_s") if table.has_key("settle_s") else None,
        cycles=table.take_positive_count("cycles", 1, _MOST_CYCLES),
        capacity=_read_capacity_phase(table.take_table("capacity")),
        objectives=tuple(
            _read_objective(each, [phase.name for phase in phases], workload.list_operations())
            for each in table.take_tables_or_empty("objectives")
        ),
    )
    table.check_no_unknown_keys()
    if not scenario.phases:
        raise ScenarioError(f"{name}: there must be at least one of [[phases]]")
    return scenario


def _read_capacity_phase(table: TomlTable) -> LoadPhase:
    """Read the table `[capacity]`: a closed loop whose measured rate is the capacity.

    The scenario's rates in per cent are relative to that.
    """
    phase = LoadPhase(
        "capacity",
        "closed",
        table.take_positive_number("duration_s", 3.0),
        connections=table.take_positive_count("connections", 16, _MOST_CONNECTIONS),
    )
    table.check_no_unknown_keys()
    return phase


def _read_phases(table: TomlTable) -> Sequence[LoadPhase]:
    """Read one table of `[[phases]]`; a list of rates makes a phase of each rate."""
    name, duration_s = table.take_text("name"), table.take_positive_number("duration_s")
    if name in ("", ALL_PHASES):
        raise ScenarioError(
            f"{table.location}: name must be a text other than {ALL_PHASES!r}, the whole run's, got {name!r}"
        )
    kind = cast(Arrivals, table.take_one_of("arrivals", get_args(Arrivals)))
    if kind == "closed":
        phases = [
            LoadPhase(
                name, kind, duration_s, connections=table.take_positive_count("connections", most=_MOST_CONNECTIONS)
            )
        ]
    else:
        given = table.take_value("rate")
        rates: Sequence[Any] = given if given and isinstance(given, list) else [given]
        phases = []
        for rate in rates:
            number, of_capacity = _parse_rate(table.location, rate)
            label = f"{name} {rate}" if len(rates) > 1 else name
            phases.append(LoadPhase(label, kind, duration_s, number, of_capacity))
    table.check_no_unknown_keys()
    return phases


def _read_objective(table: TomlTable, phases: Sequence[str], operations: Sequence[str]) -> LoadObjective:
    """Read one table of `[[objectives]]`.

    Args: phases, operations: those of the scenario.
    """
    bound = table.take_text("bound")
    try:
        objective = parse_objective(bound)
    except ValueError as error:
        raise ScenarioError(f"{table.location}: bound: {error}") from None
    phase = table.take_one_of("phase", phases) if table.has_key("phase") else None
    operation = table.take_one_of("operation", operations) if table.has_key("operation") else None
    table.check_no_unknown_keys()
    return replace(objective, phase=phase, operation=operation)


def _parse_rate(where: str, rate: Any) -> tuple[float, bool]:
    """Parse a phase's rate.  Return the number, and whether it is a fraction of the capacity, as in "60%".

    Args:
        where: the table, for messages.
        rate: the value in TOML.
    """
    of_capacity = isinstance(rate, str) and rate.endswith("%")
    try:
        number = float(rate[:-1]) / 100 if of_capacity else rate
    except ValueError:
        number = -1.0
    if not is_number(number) or not 0 < number <= MOST:
        raise ScenarioError(
            f"{where}: rate must be requests a second or a share like '60%', got {format_value(rate)}"
        )
    return number, of_capacity


def list_descriptions(scenarios: Mapping[str, LoadScenario]) -> list[tuple[str, str, float]]:
    """List the name, description and duration in seconds of each scenario."""
    return [(name, each.description, each.duration_s) for name, each in scenarios.items()]
