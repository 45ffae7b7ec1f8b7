"""What a reader should know before believing a run's numbers; above all, whether the client was the limit."""

from normload.measurements.histogram import Histogram
from normload.measurements.result import Result
from normload.measurements.tally import NOT_SENT

_BUSY = 0.8
_NOTICEABLE = 0.2
_LAG_S = 0.002
_LAG_PART = 0.25
_FEW = 1000


def remarks_on(result: Result, *, stopped: bool) -> list[str]:
    """Sentences, most important first; none when there is nothing to say."""
    remarks = []
    if stopped:
        remarks.append("The run was ended early.")
    if result.cpu and max(result.cpu) > _BUSY:
        remarks.append(
            f"The client was the limit: a process of it was busy {max(result.cpu):.0%} of the time. "
            "Give it more --processes, or more cores."
        )
    elif result.cpu and max(result.cpu) > _NOTICEABLE and _is_closed(result):
        remarks.append(
            f"The client itself was busy {max(result.cpu):.0%} of the time, and a closed loop's rate is that of "
            "server and client together."
        )
    total = result.whole.total
    lag = Histogram()
    for each in result.phases:
        lag.merge(each.tally.lag)
    late_s = lag.percentile(99)
    if late_s > _LAG_S and late_s > _LAG_PART * total.latency.percentile(50):
        remarks.append(
            f"The client was late by itself: 1 % of the requests went out {late_s * 1e3:.1f} ms and more after "
            "they could have. Its machine has too few free cores for latencies to be the server's alone."
        )
    if left := sum(count for (_, code), count in total.outcomes.items() if code == NOT_SENT):
        remarks.append(
            f"{left} requests were never sent: all {result.connections} connections were busy for so long that the "
            "schedule was over. They count as errors."
        )
    if result.capacity == 0:
        remarks.append("Nothing was answered while the capacity was looked for, so the phases were left out.")
    if 0 < total.ok < _FEW:
        remarks.append(f"{total.ok} answers are few: p99.9 is close to the maximum.")
    return remarks


def _is_closed(result: Result) -> bool:
    return any(each.phase.arrivals == "closed" for each in result.phases)
