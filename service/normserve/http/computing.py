"""Steps of an operation that all protocols over HTTP share: receive the body, compute, report the result."""

import functools
import time
from dataclasses import dataclass

from normserve.admission.permits import Permit
from normserve.engine.engine import Engine
from normserve.http.body import BodyReader
from normserve.http.exchange import Exchange
from normserve.http.measured import Measured
from normserve.jobs.job import NormJob, NormResult, Op, Pass
from normserve.jobs.memory_cost import MemoryCost
from normserve.metrics.requests import RequestRecord
from normserve.requests.admission import Admission


@dataclass(frozen=True, slots=True)
class Computing:
    """Receives and runs operations.

    Attributes:
        timeout_ms: default time from a request's arrival to its start on the device.
    """

    engine: Engine
    bodies: BodyReader
    admission: Admission
    timeout_ms: float

    async def receive(self, exchange: Exchange) -> memoryview:
        """Receive the body of a request whose head is valid; the server's work on the request begins then.

        Raises:
            NormserveError: the request is not admitted, or its body does not arrive.
        """
        self.engine.require_ready()
        body = await self.bodies.read(exchange)
        exchange.begin_work()
        record = exchange.record
        record.stages["recv"] = exchange.reception.seconds
        record.waiting_in = "parse"
        return body

    async def run(
        self, exchange: Exchange, job: NormJob, cost: MemoryCost, body_bytes: int, timeout_ms: float | None
    ) -> NormResult:
        """Charge a job to the request's permit and compute it, unless the client leaves first.

        Args:
            body_bytes: bytes that the permit covers already.
            timeout_ms: None for the server's default.

        Raises:
            NormserveError: the job takes too much memory, its deadline passes, or the device reports an error.
        """
        self.admit(exchange.permit, exchange.record, job, cost, body_bytes)
        # A job that already runs is waited for: the permit is held as long as the device works.
        exchange.sending.on_departure = functools.partial(self.engine.withdraw, job)
        try:
            return await self.engine.submit(job, self.deadline(exchange.record, timeout_ms))
        finally:
            exchange.sending.on_departure = None

    def admit(
        self, permit: Permit | None, record: RequestRecord, job: NormJob, cost: MemoryCost, body_bytes: int
    ) -> None:
        """Charge a job to a request's permit.

        Args: body_bytes: bytes that the permit covers already.

        Raises:
            TooLargeError, OverloadedError: the job takes too much memory, ever or now.
        """
        self.admission.charge(permit, job, cost, body_bytes)
        record.dtype, record.rows = job.x.dtype.label, job.rows
        record.stages["parse"] = time.perf_counter() - record.began - record.stages["recv"]
        record.waiting_in = "queue"

    def deadline(self, record: RequestRecord, timeout_ms: float | None) -> float:
        """The latest time at which a request's execution may begin, by `time.perf_counter`.

        Args: timeout_ms: None for the server's default.
        """
        return record.began + (self.timeout_ms if timeout_ms is None else timeout_ms) / 1000


def note_operation(exchange: Exchange, op: Op, direction: Pass) -> None:
    """Write the operation and its direction into the request's record."""
    exchange.record.op, exchange.record.direction = op.label, direction.label


def note_result(record: RequestRecord, result: NormResult, began: float) -> Measured:
    """Write a result's times into the request's record; return what the headers of its response say.

    Args: began: when serialisation of the response began, by `time.perf_counter`.
    """
    record.note_result(result, began)
    record.stages["serialize"] = time.perf_counter() - began
    record.waiting_in = "send"
    return Measured(
        record.stages["recv"],
        result.queue_s,
        result.copy_in_s,
        result.kernel_s,
        result.copy_out_s,
        result.kernel_bytes,
        result.kernel_bandwidth,
        result.batch_size,
    )
