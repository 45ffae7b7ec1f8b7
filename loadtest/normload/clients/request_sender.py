"""The sending of requests on a number of connections, all in one thread, with a record of each.

The thread waits for responses and scheduled requests.  It creates records (`request_recorder`) while none arrive.
"""

import collections
import random
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from normserve.client import ClientError
from normserve.client.http.server_address import ServerAddress

from normload.clients.http_connection import FAILURES, HttpLoadConnection, translate_failure
from normload.clients.local_connection import LocalLoadConnection
from normload.clients.prepared_requests import PreparedRequest
from normload.clients.request_recorder import AnyConnection, Records, RequestRecorder, SentRequest, get_error_code
from normload.clients.response_checker import ResponseChecker
from normload.load.schedules import RequestSchedule, ScheduledRequest
from normload.measurements.tallies import CONNECTION_FAILED, TIMEOUT, RequestOutcome

# Pause after a failed connection, so that connections to a stopped server are not tried in a busy loop.
_PAUSE_S = 0.02

# If a server leaves so many of the first requests unanswered, the rest of the warm-up is skipped.
_MOST_TIMEOUTS = 3

# Interval of the checks for timeouts, and of the calls of `report`.
_LOOK_S = 0.05
_REPORT_S = 0.2

# There is time to check a response if nothing is due for this long.
_SETTLE_S = 0.0005

# Shorter waits for a scheduled request use select(), whose timeout is exact to microseconds.
_EXACT_S = 0.01


@dataclass(slots=True)
class _SegmentState:
    """The state of the segment (a series of phases without a pause) that is being sent.

    Attributes:
        schedule: of the segment.
        starts: when each phase of the segment begins, by the clock.
        free: unused connections and since when, the longest unused first.
        events: polls the sockets that the exchanges in `busy` wait for.
        paused: until when each failed connection pauses, and the connection.
        busy: exchanges by the descriptor that they wait for.
        is_schedule_done: whether no more requests will be due.
    """

    schedule: RequestSchedule
    starts: Sequence[float]
    free: collections.deque[tuple[AnyConnection, float]]
    events: select.epoll
    paused: collections.deque[tuple[float, AnyConnection]] = field(default_factory=collections.deque)
    busy: dict[int, SentRequest] = field(default_factory=dict)
    is_schedule_done: bool = False


class RequestSender:
    """The sender of one process's requests, on connections that stay open from one segment to the next."""

    def __init__(
        self,
        address: ServerAddress,
        pool: Sequence[PreparedRequest],
        judge: ResponseChecker,
        *,
        check_share: float,
        seed: int,
        timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        """Args:
        address: of the server.
        pool: the requests.
        judge: checks responses.
        check_share: fraction of responses to check, from 0 to 1.
        seed: of the choice of responses to check.
        timeout_s: longest wait for the server.
        api_key: sent to a server that shares memory; over HTTP every request has it.
        """
        self._address = address
        self._pool = pool
        self._recorder = RequestRecorder(pool, judge)
        self._check_share = check_share
        self._choices = random.Random(seed)
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._connections: list[AnyConnection] = []

    def send_segment(
        self,
        schedule: RequestSchedule,
        connections: int,
        starts: Sequence[float],
        report_progress: Callable[[], None],
    ) -> None:
        """Send the requests of a schedule when they are due and a connection is free; return when all have ended.

        Args:
            schedule: the schedule.
            connections: maximum number of requests in flight.
            starts: of the segment's phases, by the clock.
            report_progress: called several times a second; it may take the records, and stop the arrivals.
        """
        if not connections:
            return
        now = time.perf_counter()
        free = collections.deque((connection, now) for connection in self._get_connections(connections))
        with select.epoll() as events:
            run = _SegmentState(schedule, starts, free, events)
            look = reported = now
            try:
                while not run.is_schedule_done or run.busy:
                    self._wait_for_events(run, self._send_due(run))
                    now = time.perf_counter()
                    if now >= look + _LOOK_S:
                        look = now
                        self._time_out_requests(run, now)
                    if now >= reported + _REPORT_S:
                        reported = now
                        report_progress()
            finally:
                for exchange in run.busy.values():
                    exchange.steps.close()
        while self._recorder.has_unrecorded:
            self._recorder.record_oldest_ended()

    def take_records(self) -> Records:
        """Return the records since the last call, like `RequestRecorder.take_records`."""
        return self._recorder.take_records()

    def send_and_check_each_once(self) -> list[RequestOutcome]:
        """Send each request of the pool once, one after another, and check every response.

        After a few timeouts the remaining requests are skipped, because each timeout takes the full time.
        """
        (connection,) = self._get_connections(1)
        records: list[RequestOutcome] = []
        for number, request in enumerate(self._pool):
            began = time.perf_counter()
            steps = connection.exchange_in_steps(request)
            exchange = SentRequest(connection, ScheduledRequest(0, began, number), began, began, True, steps)
            try:
                exchange.response = connection.run_steps(exchange.steps)
            except ClientError as error:
                exchange.code = get_error_code(error)
            exchange.ended_at = time.perf_counter()
            records.append(self._recorder.make_record(exchange, began))
            if sum(record.code == TIMEOUT for record in records) == _MOST_TIMEOUTS:
                break
        return records

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()

    def _get_connections(self, count: int) -> list[AnyConnection]:
        while len(self._connections) < count:
            self._connections.append(self._make_connection())
        return self._connections[:count]

    def _make_connection(self) -> AnyConnection:
        """Make a connection over shared memory or HTTP, by the server's address, without opening it."""
        if self._address.is_shared_memory:
            assert self._address.socket_path is not None
            return LocalLoadConnection(self._address.socket_path, self._api_key, self._timeout_s)
        return HttpLoadConnection(self._address, self._timeout_s)

    def _send_due(self, run: _SegmentState) -> float | None:
        """Send the requests that are due, until no connection is free.

        Return the seconds until the next request is due; None if no connection is free or no request
        remains. Requests that are due after the cutoff are recorded as not sent.
        """
        now = time.perf_counter()
        while run.paused and run.paused[0][0] <= now:
            until, connection = run.paused.popleft()
            run.free.append((connection, until))
        while run.free:
            slot = run.schedule.take_due(now)
            if slot is None:
                run.is_schedule_done = True
                return None
            if isinstance(slot, float):
                return slot
            connection, free = run.free.popleft()
            now = time.perf_counter()
            if max(slot.due_at, now) > run.schedule.cutoff:
                self._recorder.record_unsent(slot, run.starts[slot.phase_index], run.schedule.cutoff)
                run.free.appendleft((connection, free))
            else:
                self._start_request(run, connection, slot, free)
                now = time.perf_counter()
        return None

    def _start_request(
        self, run: _SegmentState, connection: AnyConnection, slot: ScheduledRequest, free_since: float
    ) -> None:
        """Begin to send a request, as far as possible without waiting for its socket.  Whether its response will be
        checked is chosen at random.

        Args:
            free_since: since when the connection has been free, by the clock.
        """
        request = self._pool[slot.request_index]
        check = self._choices.random() < self._check_share
        steps = connection.exchange_in_steps(request)
        exchange = SentRequest(connection, slot, free_since, time.perf_counter(), check, steps)
        self._advance(run, exchange, None)

    def _wait_for_events(self, run: _SegmentState, due_s: float | None) -> None:
        """Wait until a socket is ready or the next request is due, and continue the exchanges of ready sockets.

        If no socket is ready and the next request is not due soon, make the record of one ended request
        in place of the wait.

        Args:
            due_s: seconds until the next request is due; None if none can be sent before a response.
        """
        most = len(run.busy) + 1
        ready = run.events.poll(0, most)
        if not ready:
            if self._recorder.has_unrecorded and (due_s is None or due_s > _SETTLE_S):
                self._recorder.record_oldest_ended()
                return
            wait_s = _LOOK_S if due_s is None else min(due_s, _LOOK_S)
            if run.paused:
                wait_s = min(wait_s, _PAUSE_S)
            if due_s is not None and wait_s < _EXACT_S:
                select.select([run.events], (), (), wait_s)
                ready = run.events.poll(0, most)
            elif run.busy or not run.is_schedule_done:
                ready = run.events.poll(wait_s, most)
        for descriptor, events in ready:
            if (exchange := run.busy.pop(descriptor, None)) is not None:
                self._advance(run, exchange, events)

    def _advance(self, run: _SegmentState, exchange: SentRequest, ready_events: int | None) -> None:
        """Continue an exchange until it must wait for a socket, and register that socket with epoll.  If the
        exchange has ended, record it and free its connection.

        Args:
            ready_events: the events of the socket for which the exchange waited; None for its first step.
        """
        try:
            descriptor, events = next(exchange.steps) if ready_events is None else exchange.steps.send(ready_events)
        except StopIteration as stop:
            exchange.response = stop.value
            self._record_and_release_connection(run, exchange)
        except FAILURES as error:
            exchange.code = get_error_code(translate_failure(error))
            self._record_and_release_connection(run, exchange)
        else:
            exchange.descriptor = descriptor
            run.busy[descriptor] = exchange
            # Registered again for each wait: a new connection may have the descriptor of a closed one.
            try:
                run.events.modify(descriptor, events | select.EPOLLONESHOT)
            except FileNotFoundError:
                run.events.register(descriptor, events | select.EPOLLONESHOT)

    def _record_and_release_connection(self, run: _SegmentState, exchange: SentRequest) -> None:
        """Pass a request that has ended to the recorder, and free its connection.  A connection that failed
        pauses first.
        """
        exchange.ended_at = time.perf_counter()
        if exchange.response is not None and exchange.ended_at - exchange.sent_at > self._timeout_s:
            # Complete too late, but before the next check for timeouts.
            exchange.response, exchange.code = None, TIMEOUT
        self._recorder.defer_record(exchange, run.starts[exchange.scheduled.phase_index])
        if exchange.code == CONNECTION_FAILED:
            run.paused.append((exchange.ended_at + _PAUSE_S, exchange.connection))
        else:
            run.free.append((exchange.connection, exchange.ended_at))

    def _time_out_requests(self, run: _SegmentState, now: float) -> None:
        """End the requests whose timeout has passed, and close their connections."""
        for exchange in [each for each in run.busy.values() if each.sent_at + self._timeout_s <= now]:
            del run.busy[exchange.descriptor]
            exchange.steps.close()
            exchange.code = TIMEOUT
            self._record_and_release_connection(run, exchange)
