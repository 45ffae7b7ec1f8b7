"""Warnings for readers of a run's numbers, above all whether the client limited them."""

from normload.measurements.latency_histogram import LatencyHistogram
from normload.measurements.results import RunResult
from normload.measurements.tallies import NOT_SENT

_BUSY = 0.8
_NOTICEABLE = 0.2
_ALL_CORES = 0.9
_LAG_S = 0.002
_LAG_PART = 0.25
_FEW = 1000


def list_remarks(result: RunResult, *, stopped: bool) -> list[str]:
    """List the warnings that a reader of a run's numbers needs, as sentences, the most important one first.

    Args: stopped: whether the run was ended early.
    """
    remarks = []
    if stopped:
        remarks.append("The run was ended early.")
    remarks += [*_list_client_remarks(result), *_list_lag_remarks(result)]
    total = result.all_phases.total
    if unsent_count := sum(count for (_, code), count in total.outcomes.items() if code == NOT_SENT):
        remarks.append(
            f"{unsent_count} requests were never sent: all {result.connections} connections were busy until the "
            "end of the schedule and its grace period. They count as errors."
        )
    if result.capacity == 0:
        remarks.append("No request succeeded while the capacity was measured, so the phases were not run.")
    if 0 < total.ok < _FEW:
        remarks.append(f"With only {total.ok} successful requests, p99.9 is close to the maximum.")
    return remarks


def _list_client_remarks(result: RunResult) -> list[str]:
    """List the warnings that the client or its machine may have limited the load."""
    remarks = []
    busiest = max(result.cpu, default=0.0)
    if busiest > _BUSY:
        remarks.append(
            f"The client was the limit: one of its processes used {busiest:.0%} of a core. Use more "
            "--processes, or more cores."
        )
    elif busiest > _NOTICEABLE and _has_closed_loop(result):
        remarks.append(
            f"A client process used {busiest:.0%} of a core. A closed loop's rate depends on server and client."
        )
    machine = result.machine
    if machine is not None and machine.busy > _ALL_CORES:
        remarks.append(
            f"The client's machine was the limit: its {machine.cores} cores were busy {machine.busy:.0%} of the "
            f"time in the busiest phase, {machine.client:.0%} with the client. Use more cores, or two machines."
        )
    return remarks


def _list_lag_remarks(result: RunResult) -> list[str]:
    """Warn if the client sent requests late although a connection was free: return a list with that warning,
    else an empty list.
    """
    lag = LatencyHistogram()
    for each in result.phases:
        lag.merge(each.tally.lag)
    late_s = lag.compute_percentile_s(99)
    if not (late_s > _LAG_S and late_s > _LAG_PART * result.all_phases.total.latency.compute_percentile_s(50)):
        return []
    return [
        f"The client sent late: 1 % of the requests were sent at least {late_s * 1e3:.1f} ms after a "
        "connection was free. The latencies include these delays. The client's machine has too few free cores."
    ]


def _has_closed_loop(result: RunResult) -> bool:
    return any(each.phase.arrivals == "closed" for each in result.phases)
