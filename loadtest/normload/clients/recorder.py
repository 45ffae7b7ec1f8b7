"""The records of completed exchanges, made and checked while no response is waiting."""

import collections
import re
from collections.abc import Sequence

from normserve.client import ClientError, ConnectionFailedError, RequestTimeoutError
from normserve.client.answers.answer import Answer
from normserve.client.answers.documents import read_json

from normload.clients.exchange import Exchange
from normload.clients.judge import Judge
from normload.clients.pool import Request
from normload.load.arrivals import Slot
from normload.measurements.tally import CONNECTION_FAILED, NOT_SENT, OK, TIMEOUT, UNEXPECTED_ANSWER, Record

# The API's codes are some twenty; a server that makes up more must not fill the report with them.
_CODE = re.compile("[a-z][a-z0-9_]{0,63}")
_MOST_CODES = 64

# Ended exchanges, and bytes of answers to check, that may be left over until there is time.
_MOST_LEFT, _MOST_LEFT_BYTES = 4096, 64 * 2**20

Records = list[tuple[int, Record]]


class Recorder:
    """Makes the records of one process's exchanges."""

    def __init__(self, pool: Sequence[Request], judge: Judge) -> None:
        """Args:
        pool: what is sent.
        judge: of the answers that are to be checked.
        """
        self._pool = pool
        self._judge = judge
        self._records: Records = []
        # Ended, with the start of their phase, and not looked at yet.
        self._left: collections.deque[tuple[Exchange, float]] = collections.deque()
        self._left_bytes = 0
        self._codes: set[str] = set()

    @property
    def is_behind(self) -> bool:
        """Whether some ended whose records are not made yet."""
        return bool(self._left)

    def take(self) -> Records:
        """The records since the last call, each with the index of its phase."""
        taken, self._records = self._records, []
        return taken

    def end(self, exchange: Exchange, start: float) -> None:
        """Keep an exchange that ended until there is time for it, or too much is kept.

        Args:
            exchange: it.
            start: of its phase, by the clock.
        """
        answer = exchange.answer
        if answer is None or answer.status != 200:
            # Its text is there until the next exchange.
            exchange.code = exchange.code or self._problem(answer)
            exchange.check = False
        elif exchange.check:
            exchange.connection.leave()
            self._left_bytes += answer.nbytes
        self._left.append((exchange, start))
        while len(self._left) > _MOST_LEFT or self._left_bytes > _MOST_LEFT_BYTES:
            self.settle()

    def leave_out(self, slot: Slot, start: float, cutoff: float) -> None:
        """Make the record of a request that was due and is not sent any more.

        Args:
            slot: what was due.
            start: of its phase, by the clock.
            cutoff: when sending ended, by the clock.
        """
        operation = self._pool[slot.request].case.operation
        never = cutoff - start
        self._records.append((slot.phase, Record(operation, slot.due - start, never, never, never, 0, NOT_SENT)))

    def settle(self) -> None:
        """Make the record of an exchange that ended, the first of those that are left."""
        exchange, start = self._left.popleft()
        if exchange.check and exchange.answer is not None:
            self._left_bytes -= exchange.answer.nbytes
        self._records.append((exchange.slot.phase, self.record(exchange, start)))

    def record(self, exchange: Exchange, start: float) -> Record:
        """Look at an exchange that ended, at once.

        Args: as `end`.
        """
        slot, answer = exchange.slot, exchange.answer
        request = self._pool[slot.request]
        times = (slot.due - start, exchange.free - start, exchange.sent - start, exchange.ended - start)
        if answer is None or answer.status != 200:
            status = answer.status if answer else 0
            code = exchange.code or self._problem(answer)
            return Record(request.case.operation, *times, status, code, request.nbytes)
        timing = answer.timing()
        # A launch's time is every request's of its batch: each gets an equal part of it.
        kernel_s = timing.stages_ms.get("kernel", 0.0) / 1000 / max(1, timing.batch_size)
        return Record(
            request.case.operation,
            *times,
            answer.status,
            OK,
            request.nbytes,
            answer.nbytes,
            timing.kernel_bytes,
            kernel_s,
            exchange.check,
            self._judge.fault(slot.request, answer) if exchange.check else None,
        )

    def _problem(self, answer: Answer | None) -> str:
        """The API's code of an error; the status where there is none."""
        if answer is None:
            return UNEXPECTED_ANSWER
        try:
            document = read_json(bytes(answer.body))
        except ValueError:
            document = None
        code = document.get("code") if isinstance(document, dict) else None
        if not isinstance(code, str) or not _CODE.fullmatch(code):
            return str(answer.status)
        if code not in self._codes and len(self._codes) >= _MOST_CODES:
            return str(answer.status)
        self._codes.add(code)
        return code


def code_of(error: ClientError) -> str:
    """As in `Record`, of a request without a response."""
    if isinstance(error, ConnectionFailedError):
        return CONNECTION_FAILED
    return TIMEOUT if isinstance(error, RequestTimeoutError) else UNEXPECTED_ANSWER
