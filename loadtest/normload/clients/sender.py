"""Sends requests on a number of connections, a thread for each, and keeps a record of every one."""

import random
import re
import threading
import time
from collections.abc import Sequence

from normserve.client import ClientError, ConnectionFailedError, RequestTimeoutError
from normserve.client.answers import Answer
from normserve.client.documents import read_json

from normload.clients.connection import Address, Connection
from normload.clients.judge import Judge
from normload.clients.pool import Request
from normload.load.arrivals import Arrivals, Slot
from normload.measurements.tally import CONNECTION_FAILED, NOT_SENT, OK, TIMEOUT, UNEXPECTED_ANSWER, Record

# After a connection failed, so that a server that is gone is not asked as fast as the kernel can refuse.
_PAUSE_S = 0.02

# The API's codes are some twenty; a server that makes up more must not fill the report with them.
_CODE = re.compile("[a-z][a-z0-9_]{0,63}")
_MOST_CODES = 64

# A server that does not answer while everything is asked for once is asked no more before the run.
_MOST_TIMEOUTS = 3

Records = list[tuple[int, Record]]


class Sender:
    """The connections of one process; they stay open from one segment of a run to the next."""

    def __init__(
        self,
        address: Address,
        pool: Sequence[Request],
        judge: Judge,
        *,
        check_share: float,
        seed: int,
        timeout_s: float,
    ) -> None:
        """Args:
        address: where to.
        pool: what to send.
        judge: of the answers.
        check_share: how many of them it sees, from 0 to 1.
        seed: of the choice of those.
        timeout_s: longest wait for the server.
        """
        self._address = address
        self._pool = pool
        self._judge = judge
        self._check_share = check_share
        self._choices = random.Random(seed)
        self._timeout_s = timeout_s
        self._connections: list[Connection] = []
        self._records: Records = []
        self._failure: BaseException | None = None
        self._codes: set[str] = set()

    def run(self, arrivals: Arrivals, connections: int, starts: Sequence[float]) -> list[threading.Thread]:
        """Begin to send; who calls joins the threads that come back, and takes the records.

        Args:
            arrivals: when to send what.
            connections: requests under way at once, at most.
            starts: of the segment's phases, by the clock.
        """
        while len(self._connections) < connections:
            self._connections.append(Connection(self._address, self._timeout_s))
        threads = [
            threading.Thread(target=self._guarded, args=(connection, arrivals, starts), daemon=True)
            for connection in self._connections[:connections]
        ]
        for thread in threads:
            thread.start()
        return threads

    def take_records(self) -> Records:
        """What ended since the last call, each with its phase's place.

        Raises whatever ended a thread.
        """
        if self._failure is not None:
            raise self._failure
        # A thread may still append to the list that it has looked up, so only what is there is taken out of it.
        count = len(self._records)
        taken = self._records[:count]
        del self._records[:count]
        return taken

    def ask_all(self) -> list[Record]:
        """Send each request of the pool once, one after another, and check every answer.

        It ends early when too many were waited for in vain: each of them takes the whole of the timeout.
        """
        if not self._connections:
            self._connections.append(Connection(self._address, self._timeout_s))
        records: list[Record] = []
        for number in range(len(self._pool)):
            records.append(self._send(self._connections[0], number))
            if sum(record.code == TIMEOUT for record in records) == _MOST_TIMEOUTS:
                break
        return records

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()

    def _send(self, connection: Connection, number: int) -> Record:
        began = time.perf_counter()
        slot = Slot(0, began, number)
        return self._exchange(connection, slot, free=began, start=began, check=True)

    def _guarded(self, connection: Connection, arrivals: Arrivals, starts: Sequence[float]) -> None:
        try:
            self._connection(connection, arrivals, starts)
        except BaseException as error:
            self._failure = error
            arrivals.stop()

    def _connection(self, connection: Connection, arrivals: Arrivals, starts: Sequence[float]) -> None:
        while True:
            free = time.perf_counter()
            if (slot := arrivals.next()) is None:
                return
            start = starts[slot.phase]
            if max(slot.due, time.perf_counter()) > arrivals.cutoff:
                record = self._left_out(slot, start, arrivals.cutoff)
            else:
                check = self._choices.random() < self._check_share
                record = self._exchange(connection, slot, free=free, start=start, check=check)
            self._records.append((slot.phase, record))
            if record.code == CONNECTION_FAILED:
                time.sleep(_PAUSE_S)

    def _left_out(self, slot: Slot, start: float, cutoff: float) -> Record:
        operation = self._pool[slot.request].case.operation
        never = cutoff - start
        return Record(operation, slot.due - start, never, never, never, 0, NOT_SENT)

    def _exchange(self, connection: Connection, slot: Slot, *, free: float, start: float, check: bool) -> Record:
        request = self._pool[slot.request]
        answer: Answer | None = None
        sent = time.perf_counter()
        try:
            answer = connection.exchange(request.head, request.parts, request.most_bytes)
            code = OK if answer.status == 200 else ""
        except ClientError as error:
            code = _code(error)
        ended = time.perf_counter()
        times = (slot.due - start, free - start, sent - start, ended - start)
        if answer is None or code != OK:
            status = answer.status if answer else 0
            return Record(request.case.operation, *times, status, code or self._problem(answer), request.nbytes)
        timing = answer.timing()
        # A launch's time is every request's of its batch: each gets an equal part of it.
        kernel_s = timing.stages_ms.get("kernel", 0.0) / 1000 / max(1, timing.batch_size)
        return Record(
            request.case.operation,
            *times,
            answer.status,
            code,
            request.nbytes,
            len(answer.body),
            timing.kernel_bytes,
            kernel_s,
            check,
            self._judge.fault(slot.request, answer) if check else None,
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


def _code(error: ClientError) -> str:
    if isinstance(error, ConnectionFailedError):
        return CONNECTION_FAILED
    return TIMEOUT if isinstance(error, RequestTimeoutError) else UNEXPECTED_ANSWER
