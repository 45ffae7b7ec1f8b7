"""What a run measured of its objectives."""

import math

from normload.load.objectives import LoadObjective
from normload.measurements.results import RunResult
from normload.measurements.tallies import compute_rate

Outcome = tuple[LoadObjective, float, bool]
"""An objective, its value in a run, and whether it passed."""


def evaluate_objective(objective: LoadObjective, result: RunResult) -> Outcome:
    """Measure an objective over its phase and operation, or all of them; return it with its value and whether that
    passes.

    The value is NaN for a latency without successful requests, for errors without requests, and for a phase that
    did not run.
    """
    parts = {part.name: part for part in result.summarise_phases()}
    part = result.all_phases if objective.phase is None else parts.get(objective.phase)
    value = math.nan
    if part is not None:
        total, in_time = part.total, part.in_time
        if objective.operation is not None:
            total, in_time = part.sum_operation(objective.operation)
        if objective.metric == "errors":
            value = total.errors / total.requests if total.requests else math.nan
        elif objective.metric == "rate":
            value = compute_rate(in_time.ok, part.duration_s)
        elif objective.metric == "max":
            value = total.latency.max_s if total.latency.count else math.nan
        else:
            value = total.latency.compute_percentile_s(float(objective.metric[1:]))
    return objective, value, objective.is_met(value)
