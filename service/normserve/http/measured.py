"""What is measured of a computation, and how the headers of its response say it."""

from typing import NamedTuple

from normserve.http.transport import Headers

_TIMING = b", ".join(b"%b;dur=%%.9f" % stage for stage in (b"recv", b"queue", b"copy_in", b"kernel", b"copy_out"))


class Measured(NamedTuple):
    """Seconds by stage, and the rest of what `NormResult` says of the launch."""

    recv_s: float
    queue_s: float
    copy_in_s: float
    kernel_s: float
    copy_out_s: float
    kernel_bytes: int
    kernel_bandwidth: float
    batch_size: int

    def headers(self) -> Headers:
        """The headers of a response that say this."""
        return [
            (b"server-timing", _TIMING % tuple([1000 * seconds for seconds in self[:5]])),
            (b"x-kernel-bytes", b"%d" % self.kernel_bytes),
            (b"x-kernel-bandwidth", b"%.0f" % self.kernel_bandwidth),
            (b"x-batch-size", b"%d" % self.batch_size),
        ]
