"""Steps of an operation that all protocols over HTTP share: receive the body, compute, report the result."""

import functools
import time
from dataclasses import dataclass

from normserve.engine.engine import Engine
from normserve.http.body import BodyReader
from normserve.http.exchange import Exchange
from normserve.http.measured import Measured
from normserve.jobs.job import NormJob, NormResult, Op, Pass
from normserve.jobs.memory_cost import MemoryCost
from normserve.metrics.requests import RequestRecord


@dataclass(frozen=True, slots=True)
class Computing:
    """Receives and runs operations."""

    engine: Engine
    bodies: BodyReader

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
        exchange.charge_memory(job, cost, body_bytes)
        # A job that already runs is waited for: the permit is held as long as the device works.
        exchange.sending.on_departure = functools.partial(self.engine.withdraw, job)
        try:
            return await self.engine.submit(job, exchange.deadline(timeout_ms))
        finally:
            exchange.sending.on_departure = None


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
