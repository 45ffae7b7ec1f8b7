"""What is kept of each request, and what it adds up to."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """One request and how it ended.

    Attributes:
        operation: as in the API's path.
        started_s: when it was meant to be sent, counted from the run's beginning.
        latency_s: from then until the answer was complete.
        code: "ok", the API's code of an error, or what kept the answer away.
        sent_bytes, received_bytes: of tensors.
        kernel_bytes, kernel_s: what the server says of its device.
        checked: whether the answer was compared with the right one.
        fault: what was wrong with it.
    """

    operation: str
    started_s: float
    latency_s: float
    code: str
    sent_bytes: int
    received_bytes: int = 0
    kernel_bytes: int = 0
    kernel_s: float = 0.0
    checked: bool = False
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """What some records add up to.

    Attributes:
        requests: all of them.
        rate: successful requests a second.
        bytes_per_second: in and out, of successful requests.
        p50_s, p99_s: latency that this share of the successful requests did not pass; NaN without any.
        errors: unsuccessful requests by code.
        checked, wrong: compared answers, and those that differed.
    """

    requests: int
    rate: float
    bytes_per_second: float
    p50_s: float
    p99_s: float
    errors: Counter[str]
    checked: int
    wrong: int


def summarise(records: Sequence[Record], elapsed_s: float) -> Summary:
    """Add up what happened in `elapsed_s` seconds."""
    successes = [record for record in records if record.code == "ok"]
    latencies = sorted(record.latency_s for record in successes)
    moved = sum(record.sent_bytes + record.received_bytes for record in successes)
    return Summary(
        requests=len(records),
        rate=len(successes) / elapsed_s if elapsed_s > 0 else 0.0,
        bytes_per_second=moved / elapsed_s if elapsed_s > 0 else 0.0,
        p50_s=percentile(latencies, 50),
        p99_s=percentile(latencies, 99),
        errors=Counter(record.code for record in records if record.code != "ok"),
        checked=sum(record.checked for record in records),
        wrong=sum(record.fault is not None for record in records),
    )


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed; NaN when there is none."""
    if not ascending:
        return math.nan
    return ascending[max(0, math.ceil(len(ascending) * percent / 100) - 1)]
