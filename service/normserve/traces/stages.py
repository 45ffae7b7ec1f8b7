"""Begin and end of each stage of a request, computed from the durations in its record."""

from collections.abc import Iterator
from typing import NamedTuple

from normserve.metrics.requests import NONE, RequestRecord

# A span costs the server about as much time as such a stage takes.
SHORTEST_S = 20e-6


class StageInterval(NamedTuple):
    """One stage; `began` and `ended` by `time.perf_counter`."""

    name: str
    began: float
    ended: float


def compute_stage_intervals(record: RequestRecord, ended: float) -> list[StageInterval]:
    """Those that a request went through until `ended`, in their order.

    Of a launch that several requests share, each has the whole.  Of a request that succeeded, stages shorter than
    `SHORTEST_S` are left out, except for `kernel`.  An operation that was refused or given up has all of them, and
    the stage that it was in then.
    """
    queue = record.stages.get("queue", 0.0)
    stages = [
        *_place_consecutively(record, record.began, "recv", "parse"),
        *_place_consecutively(record, record.launched - queue, "queue", "copy_in", "kernel", "copy_out"),
        *_place_consecutively(record, record.answering, "serialize", "send"),
    ]
    if record.status < 400:
        return [stage for stage in stages if stage.name == "kernel" or stage.ended - stage.began >= SHORTEST_S]
    if record.direction != NONE and record.waiting_in not in record.stages:
        began = stages[-1].ended if stages else record.began
        stages.append(StageInterval(record.waiting_in, began, max(began, ended)))
    return stages


def _place_consecutively(record: RequestRecord, began: float, *names: str) -> Iterator[StageInterval]:
    """Stages that follow one another from `began` on, without those that there were not."""
    for name in names:
        seconds = record.stages.get(name)
        if seconds is not None:
            yield StageInterval(name, began, began + seconds)
            began += seconds
