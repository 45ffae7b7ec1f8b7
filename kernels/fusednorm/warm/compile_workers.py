"""Compilation in parallel processes, which all write to Triton's cache.

Triton's compiler holds Python's lock for much of its time, so threads would wait for one another.  The processes
are forked, because kernels cannot be sent to another process.  Each process takes the next ticket from a common
pipe, so that tickets are processed in order, and reports the result through another pipe.  If a process dies, only
its current ticket is lost.
"""

import os
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_TICKET = struct.Struct("<i")
_REPORT = struct.Struct("<idq?")
_ROUNDS = 2
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class TicketResult:
    """Result of one ticket, a number that stands for a kernel to compile.

    Attributes:
        seconds: the time that the compilation took.
        nbytes: the kernel's size in the cache; -1 if the compilation failed.
        was_cached: whether the kernel was in the cache already.
    """

    ticket: int
    seconds: float
    nbytes: int
    was_cached: bool


Work = Callable[[int], tuple[int, bool]]
"""A function that processes a ticket; returns its bytes in the cache, and whether they were cached before."""


def run_tickets(
    tickets: Sequence[int], work: Work, jobs: int, is_wanted: Callable[[], bool]
) -> Iterator[TicketResult]:
    """Process each ticket, the number of a kernel, in one of `jobs` forked processes.

    Results are yielded in order of completion.  A ticket whose process dies is processed once more.

    Args:
        is_wanted: called twice a second; when it returns False, the processes are killed.
    """
    for _ in range(_ROUNDS):
        remaining = set(tickets)
        for done in _run_round([ticket for ticket in tickets if ticket in remaining], work, jobs, is_wanted):
            remaining.discard(done.ticket)
            yield done
        tickets = [ticket for ticket in tickets if ticket in remaining]
        if not tickets or not is_wanted():
            return


def _run_round(
    tickets: Sequence[int], work: Work, jobs: int, is_wanted: Callable[[], bool]
) -> Iterator[TicketResult]:
    """Fork the processes, let them process each ticket once, and yield the results.

    A ticket whose process dies has no result.  All processes have ended when the last result was taken.
    """
    to_take, to_give = os.pipe()
    to_hear, to_report = os.pipe()
    workers = []
    sys.stdout.flush()
    for _ in range(min(jobs, len(tickets))):
        worker = os.fork()
        if worker == 0:
            os.close(to_give)
            os.close(to_hear)
            _run_worker_and_exit(to_take, to_report, work)
        workers.append(worker)
    os.close(to_take)
    os.close(to_report)
    try:
        # A pipe holds a few thousand tickets, and the workers read them meanwhile.
        os.set_blocking(to_give, False)
        yield from _exchange_tickets(to_give, to_hear, [_TICKET.pack(ticket) for ticket in tickets], is_wanted)
    finally:
        os.close(to_hear)
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)


def _exchange_tickets(
    ticket_writer: int, result_reader: int, tickets: list[bytes], is_wanted: Callable[[], bool]
) -> Iterator[TicketResult]:
    """Send tickets to the workers and yield results, until all workers have ended or `is_wanted` returns False."""
    tickets.reverse()
    polled_at = time.monotonic()
    while True:
        readable, writable, _ = select.select([result_reader], [ticket_writer] if tickets else [], [], _POLL_S)
        if writable:
            try:
                os.write(ticket_writer, tickets[-1])
                tickets.pop()
            except BrokenPipeError:
                tickets.clear()
            if not tickets:
                os.close(ticket_writer)
        if readable:
            report = os.read(result_reader, _REPORT.size)
            if not report:
                break
            ticket, seconds, nbytes, was_there = _REPORT.unpack(report)
            yield TicketResult(ticket, seconds, nbytes, was_there)
        if time.monotonic() - polled_at > _POLL_S:
            polled_at = time.monotonic()
            if not is_wanted():
                break
    if tickets:
        os.close(ticket_writer)


def _run_worker_and_exit(ticket_reader: int, result_writer: int, work: Work) -> None:
    """Process tickets in a forked process until none is left or the parent has ended, then exit the process."""
    parent = os.getppid()
    # A parent that was killed cannot notify its workers.
    while (ticket_bytes := os.read(ticket_reader, _TICKET.size)) and os.getppid() == parent:
        (ticket,) = _TICKET.unpack(ticket_bytes)
        began = time.perf_counter()
        try:
            nbytes, was_there = work(ticket)
        except Exception:
            traceback.print_exc()
            nbytes, was_there = -1, False
        os.write(result_writer, _REPORT.pack(ticket, time.perf_counter() - began, nbytes, was_there))
    os._exit(0)
