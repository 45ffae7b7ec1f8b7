"""The measurements of a computation, and the response headers that contain them."""

import time
from typing import NamedTuple

from normserve.http.transport import Headers
from normserve.jobs.job import NormResult
from normserve.metrics.request_metrics import RequestRecord

_TIMING = b", ".join(b"%b;dur=%%.9f" % stage for stage in (b"recv", b"queue", b"copy_in", b"kernel", b"copy_out"))


class LaunchMeasurements(NamedTuple):
    """The measurements in the headers of a response: seconds of each stage, and figures of the launch.

    Attributes:
        kernel_bytes: the fewest bytes that this request's share of the launch must move.
        kernel_bandwidth: the fewest bytes of the launch per second of its kernel time.
        batch_size: number of requests that shared the launch.
    """

    recv_s: float
    queue_s: float
    copy_in_s: float
    kernel_s: float
    copy_out_s: float
    kernel_bytes: int
    kernel_bandwidth: float
    batch_size: int

    def make_headers(self) -> Headers:
        """Return the response headers with these measurements."""
        return [
            (b"server-timing", _TIMING % tuple([1000 * seconds for seconds in self[:5]])),
            (b"x-kernel-bytes", b"%d" % self.kernel_bytes),
            (b"x-kernel-bandwidth", b"%.0f" % self.kernel_bandwidth),
            (b"x-batch-size", b"%d" % self.batch_size),
        ]


def record_result(record: RequestRecord, result: NormResult, encoding_began: float) -> LaunchMeasurements:
    """Write a result's times into the request's record; return the measurements for the response's headers.

    Args: encoding_began: when serialisation of the response began, by `time.perf_counter`.
    """
    record.record_result(result, encoding_began)
    record.stage_seconds["serialize"] = time.perf_counter() - encoding_began
    record.current_stage = "send"
    return LaunchMeasurements(
        record.stage_seconds["recv"],
        result.queue_s,
        result.copy_in_s,
        result.kernel_s,
        result.copy_out_s,
        result.kernel_bytes,
        result.kernel_bandwidth,
        result.batch_size,
    )
