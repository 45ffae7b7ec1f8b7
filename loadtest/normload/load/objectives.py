"""Objectives of a run, such as `p99<20ms`, `errors<0.1%` and `rate>500`."""

import math
import re
from dataclasses import dataclass

_OBJECTIVE = re.compile(
    r"(?P<metric>p\d{1,2}(?:\.\d+)?|max|errors|rate)\s*(?P<relation><=|>=|<|>)\s*(?P<number>\d+(?:\.\d+)?)\s*"
    r"(?P<unit>us|µs|ms|s|%|/s)?"
)
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class LoadObjective:
    """A bound that a metric must satisfy, such as p99<20ms.

    Attributes:
        text: as given.
        metric: p50, p99.9 etc. or max of latency in seconds; errors as a fraction of all requests; rate of
            successful requests per second.
        at_most: whether the bound is an upper one.
        inclusive: whether a value equal to the bound passes.
        bound: in the metric's unit.
        phase, operation: those that it applies to; None for all.
    """

    text: str
    metric: str
    at_most: bool
    inclusive: bool
    bound: float
    phase: str | None = None
    operation: str | None = None

    @property
    def label(self) -> str:
        """The text, with the operation and the phase that it applies to."""
        operation = "" if self.operation is None else f" of {self.operation}"
        return f"{self.text}{operation}" if self.phase is None else f"{self.text}{operation} in {self.phase}"

    def is_met(self, value: float) -> bool:
        """Return whether a value is within the bound; NaN is not."""
        if value == self.bound:
            return self.inclusive
        return value < self.bound if self.at_most else value > self.bound

    def format_value(self, value: float) -> str:
        """Format a value of the metric: latencies in ms, errors in per cent, the rate per second.  NaN is not
        measured.
        """
        if math.isnan(value):
            return "not measured"
        if self.metric == "errors":
            return f"{value:.3%}"
        return f"{value:.1f}/s" if self.metric == "rate" else f"{value * 1e3:.2f} ms"


def parse_objective(text: str) -> LoadObjective:
    """Parse the text of an objective, such as "p99<20ms".

    Raises:
        ValueError: the text is not an objective.
    """
    match = _OBJECTIVE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"an objective must be like p99<20ms, errors<0.1% or rate>500, got {text!r}")
    metric, unit, number = match["metric"], match["unit"], float(match["number"])
    if metric == "errors":
        if unit not in ("%", None):
            raise ValueError(f"errors must be a share like 0.1%, got {text!r}")
        if not unit and number >= 1:
            raise ValueError(f"errors must be a share like 0.1% or 0.001, got {text!r}, which is {number:.0%}")
        bound = number / 100 if unit else number
    elif metric == "rate":
        if unit not in ("/s", None):
            raise ValueError(f"rate must be a number a second like 500/s, got {text!r}")
        bound = number
    elif unit in _SECONDS:
        bound = number * _SECONDS[unit]
    else:
        raise ValueError(f"{metric} must be a time like 20ms, got {text!r}")
    return LoadObjective(text.strip(), metric, match["relation"][0] == "<", len(match["relation"]) == 2, bound)
