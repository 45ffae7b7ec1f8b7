"""The requests of a client process in progress, and the records of those that have ended.

Records are created, and responses are checked, while no response waits to be received, or as soon as too many
ended requests wait for their records.
"""

import collections
import re
from collections.abc import Sequence
from dataclasses import dataclass

from normserve.client import ClientError, ConnectionFailedError, RequestTimeoutError
from normserve.client.http.socket_steps import Steps
from normserve.client.responses.api_errors import parse_strict_json
from normserve.client.responses.api_response import ApiResponse

from normload.clients.http_connection import HttpLoadConnection
from normload.clients.local_connection import LocalLoadConnection
from normload.clients.prepared_requests import PreparedRequest
from normload.clients.response_checker import ResponseChecker
from normload.load.schedules import ScheduledRequest
from normload.measurements.tallies import (
    CONNECTION_FAILED,
    NOT_SENT,
    OK,
    TIMEOUT,
    UNEXPECTED_ANSWER,
    RequestOutcome,
)

AnyConnection = HttpLoadConnection | LocalLoadConnection

# The API has some twenty codes; a server with invented ones must not fill the report.
_CODE = re.compile("[a-z][a-z0-9_]{0,63}")
_MOST_CODES = 64

# Limits of the ended exchanges, and of the bytes of responses to check, that may wait.
_MAX_UNRECORDED, _MAX_UNRECORDED_BYTES = 4096, 64 * 2**20


@dataclass(slots=True)
class SentRequest:
    """A request that was sent.  Its response, or the code of its failure, is set when the request ends.

    Attributes:
        connection: the connection that the request uses.
        scheduled: the request, and its scheduled time.
        free_at, sent_at, ended_at: when the connection was free, the request sent, and ended, by the clock.
        is_checked: whether the response is compared with the expected one.
        steps: the remaining steps of the exchange.
        descriptor: the socket's descriptor, which the exchange waits for.
        response: the response; None before it arrives, and after a failure.
        code: as in `RequestOutcome`; "" if it follows from the response.
    """

    connection: AnyConnection
    scheduled: ScheduledRequest
    free_at: float
    sent_at: float
    is_checked: bool
    steps: Steps[ApiResponse]
    descriptor: int = -1
    ended_at: float = 0.0
    response: ApiResponse | None = None
    code: str = ""


Records = list[tuple[int, RequestOutcome]]


class RequestRecorder:
    """The object that makes a record (`RequestOutcome`) of each request of one process.  It also checks responses.

    Requests that have ended wait here for their records, which are made while no response waits to be
    received.
    """

    def __init__(self, pool: Sequence[PreparedRequest], judge: ResponseChecker) -> None:
        """Args:
        pool: the requests.
        judge: checks responses.
        """
        self._pool = pool
        self._judge = judge
        self._records: Records = []
        # Ended exchanges without a record, with the start of their phase.
        self._unrecorded: collections.deque[tuple[SentRequest, float]] = collections.deque()
        self._unrecorded_bytes = 0
        self._codes: set[str] = set()

    @property
    def has_unrecorded(self) -> bool:
        """Whether ended exchanges wait for their records."""
        return bool(self._unrecorded)

    def take_records(self) -> Records:
        """Return the records since the last call, each with the index of its phase."""
        records, self._records = self._records, []
        return records

    def defer_record(self, exchange: SentRequest, start: float) -> None:
        """Keep a request that has ended, to make its record later.  If too many wait, make the records of
        the oldest ones now.

        Args:
            exchange: the ended exchange.
            start: of its phase, by the clock.
        """
        answer = exchange.response
        if answer is None or answer.status != 200:
            # Its text is valid until the next exchange.
            exchange.code = exchange.code or self._find_error_code(answer)
            exchange.is_checked = False
        elif exchange.is_checked:
            exchange.connection.detach_response()
            self._unrecorded_bytes += answer.nbytes
        self._unrecorded.append((exchange, start))
        while len(self._unrecorded) > _MAX_UNRECORDED or self._unrecorded_bytes > _MAX_UNRECORDED_BYTES:
            self.record_oldest_ended()

    def record_unsent(self, slot: ScheduledRequest, start: float, cutoff: float) -> None:
        """Make the record of a request that was due but was not sent before the schedule's cutoff.

        Args:
            slot: the request that was due.
            start: of its phase, by the clock.
            cutoff: when sending ended, by the clock.
        """
        operation = self._pool[slot.request_index].case.operation
        never = cutoff - start
        self._records.append(
            (slot.phase_index, RequestOutcome(operation, slot.due_at - start, never, never, never, 0, NOT_SENT))
        )

    def record_oldest_ended(self) -> None:
        """Make the record of the request that ended first among those without a record; there must be one."""
        exchange, start = self._unrecorded.popleft()
        if exchange.is_checked and exchange.response is not None:
            self._unrecorded_bytes -= exchange.response.nbytes
        self._records.append((exchange.scheduled.phase_index, self.make_record(exchange, start)))

    def make_record(self, exchange: SentRequest, start: float) -> RequestOutcome:
        """Make and return the record of a request that has ended.  If the request was chosen for a check, its
        response is checked first.

        Args:
            exchange: the ended exchange.
            start: of its phase, by the clock.
        """
        slot, answer = exchange.scheduled, exchange.response
        request = self._pool[slot.request_index]
        times = (slot.due_at - start, exchange.free_at - start, exchange.sent_at - start, exchange.ended_at - start)
        if answer is None or answer.status != 200:
            status = answer.status if answer else 0
            code = exchange.code or self._find_error_code(answer)
            return RequestOutcome(request.case.operation, *times, status, code, request.nbytes)
        timing = answer.read_timing()
        # The server reports the launch's time for every request of a batch: each gets an equal part.
        kernel_s = timing.stages_ms.get("kernel", 0.0) / 1000 / max(1, timing.batch_size)
        return RequestOutcome(
            request.case.operation,
            *times,
            answer.status,
            OK,
            request.nbytes,
            answer.nbytes,
            timing.kernel_bytes,
            kernel_s,
            exchange.is_checked,
            self._judge.find_fault(slot.request_index, answer) if exchange.is_checked else None,
        )

    def _find_error_code(self, answer: ApiResponse | None) -> str:
        """Return the API's error code in a response, or its HTTP status as text if it has no valid code.

        Without a response, return `UNEXPECTED_ANSWER`.

        Only a limited number of different codes is returned, so that a server cannot fill the report.
        """
        if answer is None:
            return UNEXPECTED_ANSWER
        try:
            document = parse_strict_json(bytes(answer.body))
        except ValueError:
            document = None
        code = document.get("code") if isinstance(document, dict) else None
        if not isinstance(code, str) or not _CODE.fullmatch(code):
            return str(answer.status)
        if code not in self._codes and len(self._codes) >= _MOST_CODES:
            return str(answer.status)
        self._codes.add(code)
        return code


def get_error_code(error: ClientError) -> str:
    """Return the error code for the record of a request that ended with this error instead of a response."""
    if isinstance(error, ConnectionFailedError):
        return CONNECTION_FAILED
    return TIMEOUT if isinstance(error, RequestTimeoutError) else UNEXPECTED_ANSWER
