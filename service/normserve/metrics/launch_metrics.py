"""The metrics of a launch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from normserve.jobs.job import Batch, BatchResult, NormJob, Op, PassDirection
from normserve.memory.tensors import DType
from normserve.metrics.registry import COUNTED_AT_ONCE, KERNEL_LABELS, MetricRegistry

# Bytes per second, from 1 MB/s to 8 TB/s.  From 1 GB/s on, a loss of a fifth is a bucket.
_BANDWIDTH_BUCKETS = (
    *[1e6 * 2**k for k in range(10)],
    *[float(round(8e12 * 0.8**k)) for k in range(40, -1, -1)],
)
_BATCH_REQUESTS_BUCKETS = tuple(float(2**k) for k in range(9))
_BATCH_BYTES_BUCKETS = tuple(float(4**k * 256) for k in range(13))


@dataclass(slots=True)
class _LaunchRecord:
    """The counts and durations of one launch, kept until they are added to the metrics.  It does not refer to the
    launch's memory.
    """

    request_count: int
    input_bytes: int
    result_bytes: int
    kernel_bytes: int
    kernel_s: float
    copy_in_s: float
    copy_out_s: float


class LaunchMetrics:
    """The metrics of launches, compilations and copies."""

    def __init__(self, make: MetricRegistry) -> None:
        self._bytes = make.add_counter(
            "kernel_bytes_total", "Minimum of bytes that the launched operations have to move.", KERNEL_LABELS
        )
        self._seconds = make.add_counter("kernel_seconds_total", "Device time of the launches.", KERNEL_LABELS)
        self._bandwidth = make.add_histogram(
            "kernel_bandwidth_bytes_per_second",
            "Bandwidth of each launch: the minimum of bytes to move divided by device time.",
            KERNEL_LABELS,
            _BANDWIDTH_BUCKETS,
        )
        self._transfer_bytes = make.add_counter(
            "transfer_bytes_total", "Bytes of tensors copied to and from the device.", ("direction",)
        )
        self._transfer_seconds = make.add_counter("transfer_seconds_total", "Time of these copies.", ("direction",))
        self._compiles = make.add_counter(
            "compiles_total",
            "Request classes whose kernels were compiled after the start, at their first request.",
            (),
        )
        self._compile_seconds = make.add_counter("compile_seconds_total", "Time of these compilations.", ())
        batch_requests = make.add_histogram(
            "batch_requests", "Requests that shared a launch.", (), _BATCH_REQUESTS_BUCKETS
        )
        batch_bytes = make.add_histogram(
            "batch_bytes", "Bytes of the input tensors of a launch.", (), _BATCH_BYTES_BUCKETS
        )
        self._batch_requests, self._batch_bytes = batch_requests(), batch_bytes()
        self._recorded: list[tuple[tuple[Op, PassDirection, DType], _LaunchRecord]] = []

    def observe_compile(self, seconds: float) -> None:
        self._compiles().inc()
        self._compile_seconds().inc(seconds)

    def observe_launch(self, batch: Batch, execution: BatchResult) -> None:
        """Record a launch.  The metrics are updated here once enough launches are recorded, or by `flush`."""
        launch = _LaunchRecord(
            len(batch.jobs),
            batch.nbytes,
            sum([len(tensor.data) for outputs in execution.results for tensor in outputs.values()]),
            sum(execution.kernel_bytes),
            execution.kernel_s,
            execution.copy_in_s,
            execution.copy_out_s,
        )
        job = batch.jobs[0]
        self._recorded.append(((job.spec.op, job.spec.direction, job.x.dtype), launch))
        if len(self._recorded) >= COUNTED_AT_ONCE:
            self.flush()

    def observe_replays(
        self, job: NormJob, result_bytes: int, kernel_bytes: int, stages: Mapping[str, Sequence[float]]
    ) -> None:
        """Count replayed launches of one job each.  The launches are equal except for their durations.

        Args:
            job: any of their jobs.
            result_bytes: bytes of the results of each.
            kernel_bytes: the fewest bytes that each must move.
            stages: seconds of each in "copy_in", "kernel" and "copy_out".
        """
        op, direction, dtype = job.spec.op, job.spec.direction, job.x.dtype
        times = zip(stages["kernel"], stages["copy_in"], stages["copy_out"], strict=True)
        launches = [_LaunchRecord(1, job.nbytes, result_bytes, kernel_bytes, *each) for each in times]
        self._count_launches((op.value, direction.value, dtype.value), launches)

    def flush(self) -> None:
        """Update the metrics for the launches that were recorded since the last call."""
        alike: dict[tuple[Op, PassDirection, DType], list[_LaunchRecord]] = {}
        for kind, launch in self._recorded:
            alike.setdefault(kind, []).append(launch)
        self._recorded.clear()
        for (op, direction, dtype), launches in alike.items():
            self._count_launches((op.value, direction.value, dtype.value), launches)

    def _count_launches(self, labels: tuple[str, str, str], launches: Sequence[_LaunchRecord]) -> None:
        """Update the metrics for launches that have equal labels."""
        self._bytes(*labels).inc(sum([launch.kernel_bytes for launch in launches]))
        self._seconds(*labels).inc(sum([launch.kernel_s for launch in launches]))
        timed = [launch for launch in launches if launch.kernel_bytes and launch.kernel_s > 0]
        if timed:
            self._bandwidth(*labels).observe_many([launch.kernel_bytes / launch.kernel_s for launch in timed])
        self._batch_requests.observe_many([launch.request_count for launch in launches])
        self._batch_bytes.observe_many([launch.input_bytes for launch in launches])
        # Data that kernels read or write in the host's memory is not copied, and its time is the kernel's.
        self._count_copies("in", [(each.input_bytes, each.copy_in_s) for each in launches if each.copy_in_s > 0])
        self._count_copies(
            "out", [(each.result_bytes, each.copy_out_s) for each in launches if each.copy_out_s > 0]
        )

    def _count_copies(self, direction: str, copies: Sequence[tuple[int, float]]) -> None:
        if copies:
            self._transfer_bytes(direction).inc(sum([nbytes for nbytes, _ in copies]))
            self._transfer_seconds(direction).inc(sum([seconds for _, seconds in copies]))
