"""Sends requests on a number of connections and keeps a record of each."""

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from normserve.client import (
    ApiError,
    AsyncClient,
    BackwardResult,
    ClientError,
    ConnectionFailedError,
    ForwardResult,
    HostTensor,
    RequestTimeoutError,
)

from normload import oracle
from normload.records import Record
from normload.workload import Request

Result = ForwardResult[HostTensor] | BackwardResult[HostTensor]


class Arrivals(Protocol):
    """Decides when a connection sends."""

    async def next(self) -> float | None:
        """Wait until a connection may send, and return when it was meant to; None when all is sent."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run.

    Attributes:
        records: in the order in which the answers came.
        elapsed_s: from the first request to the last answer.
    """

    records: list[Record]
    elapsed_s: float


class Runner:
    """One run: connections that draw from a workload when the arrivals tell them to."""

    def __init__(
        self,
        clients: Sequence[AsyncClient],
        workload: Iterable[Request],
        arrivals: Arrivals,
        *,
        check_share: float,
        seed: int,
        on_record: Callable[[Record], None],
    ) -> None:
        """Args:
        clients: one a connection; they should not retry, so that every refusal is counted.
        workload: what to send.
        arrivals: when to send.
        check_share: how many of the answers are compared with the right ones, from 0 to 1.
        seed: of the choice of those.
        on_record: told of every request when it has ended.
        """
        self._clients = clients
        self._workload = iter(workload)
        self._arrivals = arrivals
        self._check_share = check_share
        self._choices = random.Random(seed)
        self._on_record = on_record
        self._records: list[Record] = []

    async def run(self) -> Run:
        """Send until the arrivals end, on all connections at once."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for client in self._clients:
                tasks.create_task(self._connection(client, began))
        ends = [record.started_s + record.latency_s for record in self._records]
        return Run(self._records, max(ends, default=0.0))

    async def _connection(self, client: AsyncClient, began: float) -> None:
        while (intended := await self._arrivals.next()) is not None:
            request = next(self._workload)
            record, result = await self._send(client, request, began, intended)
            if result is not None and self._choices.random() < self._check_share:
                # In a thread, so that the other connections go on; this one pauses, which no latency counts.
                fault = await asyncio.to_thread(oracle.fault, request.case, request.tensors, _tensors(result))
                record = replace(record, checked=True, fault=fault)
            self._records.append(record)
            self._on_record(record)

    async def _send(
        self, client: AsyncClient, request: Request, began: float, intended: float
    ) -> tuple[Record, Result | None]:
        case, result, code = request.case, None, "ok"
        method = getattr(client, case.operation.replace("/", "_"))
        try:
            result = await method(**request.tensors, **case.parameters())
        except ClientError as error:
            code = _code(error)
        ended = time.perf_counter()
        record = Record(case.operation, intended - began, ended - intended, code, request.nbytes)
        if result is None:
            return record, None
        timing = result.timing
        received = sum(tensor.nbytes for tensor in _tensors(result).values())
        kernel_s = timing.stages_ms.get("kernel", 0.0) / 1000
        return replace(record, received_bytes=received, kernel_bytes=timing.kernel_bytes, kernel_s=kernel_s), result


def _tensors(result: Result) -> dict[str, HostTensor]:
    values: dict[str, Any] = {field.name: getattr(result, field.name) for field in fields(result)}
    return {name: value for name, value in values.items() if isinstance(value, HostTensor)}


def _code(error: ClientError) -> str:
    if isinstance(error, ApiError):
        return error.code or str(error.status)
    if isinstance(error, ConnectionFailedError):
        return "connection_failed"
    return "timeout" if isinstance(error, RequestTimeoutError) else "unexpected_answer"
