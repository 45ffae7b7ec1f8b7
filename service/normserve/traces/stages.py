"""Begin and end of each stage of a request, computed from the durations in its record."""

from collections.abc import Iterator
from typing import NamedTuple

from normserve.metrics.request_metrics import NONE, RequestRecord

# A span costs the server about as much time as such a stage takes.
SHORTEST_S = 20e-6


class StageInterval(NamedTuple):
    """One stage, with begin and end by `time.perf_counter`."""

    name: str
    began_at: float
    ended_at: float


def compute_stage_intervals(record: RequestRecord, ended: float) -> list[StageInterval]:
    """Compute the stages of a request until `ended`, in their order.

    Requests that share a launch each have its full duration.  Stages of a successful request that are shorter than
    `SHORTEST_S` are left out, except for `kernel`.  A refused or aborted operation has all its stages, with the one
    that it was in at its end.
    """
    queue = record.stage_seconds.get("queue", 0.0)
    stages = [
        *_place_consecutively(record, record.began_at, "recv", "parse"),
        *_place_consecutively(record, record.launched_at - queue, "queue", "copy_in", "kernel", "copy_out"),
        *_place_consecutively(record, record.response_began_at, "serialize", "send"),
    ]
    if record.status < 400:
        return [
            stage for stage in stages if stage.name == "kernel" or stage.ended_at - stage.began_at >= SHORTEST_S
        ]
    if record.direction != NONE and record.current_stage not in record.stage_seconds:
        began = stages[-1].ended_at if stages else record.began_at
        stages.append(StageInterval(record.current_stage, began, max(began, ended)))
    return stages


def _place_consecutively(record: RequestRecord, began: float, *names: str) -> Iterator[StageInterval]:
    """Yield consecutive intervals from `began` on, for those of the stages that the request has."""
    for name in names:
        seconds = record.stage_seconds.get(name)
        if seconds is not None:
            yield StageInterval(name, began, began + seconds)
            began += seconds
