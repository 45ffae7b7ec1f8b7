"""The upper bound of bandwidth for a server on this machine: the loopback, measured in the same run.

Pairs of processes, one for each client process, echo messages of the load's mean size over blocking sockets,
without HTTP or tensors.
"""

import ipaddress
import multiprocessing
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from normload.interrupts import block_interrupts_of_children
from normload.measurements.latency_histogram import LatencyHistogram

_SECONDS = 0.5
_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class LoopbackEcho:
    """The measured round trips of messages between processes of this machine.

    Attributes:
        nbytes: size of a message.
        pairs: number of socket pairs at once.
        round_trips_per_second: of all pairs together.
        p50_s: of one round trip.
    """

    nbytes: int
    pairs: int
    round_trips_per_second: float
    p50_s: float

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second in both directions, of all pairs."""
        return 2 * self.nbytes * self.round_trips_per_second


def resolves_to_loopback(host_name: str) -> bool:
    """Return whether all addresses of a host name are loopback addresses; False if it has none."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host_name, None)}
    # UnicodeError: the name cannot be encoded for resolution.
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)


def measure_echo(nbytes: int, pairs: int, seconds: float = _SECONDS, *, is_unix: bool = False) -> LoopbackEcho:
    """Measure round trips of messages between pairs of processes, over TCP or Unix domain sockets.

    Args:
        nbytes: size of a message.
        pairs: number of pairs of processes, which measure at once.
        seconds: duration of the measurement.

    Raises:
        TimeoutError: a process did not respond in time.
        EOFError: a process ended early.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(pairs):
        ours, theirs = context.Pipe()
        here, there = socket.socketpair() if is_unix else _connect_pair()
        processes.append(context.Process(target=_echo_messages, args=(there, nbytes), daemon=True))
        processes.append(
            context.Process(target=_measure_round_trips, args=(here, nbytes, seconds, theirs), daemon=True)
        )
        pipes.append(ours)
        with block_interrupts_of_children():
            for process in processes[-2:]:
                process.start()
        for end in (here, there, theirs):
            end.close()
    try:
        # No pair starts before all are ready.
        for pipe in pipes:
            _receive_in_time(pipe, _WAIT_S)
        for pipe in pipes:
            pipe.send(None)
        measured = [_receive_in_time(pipe, seconds + _WAIT_S) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    latency = LatencyHistogram()
    for _, times in measured:
        latency.merge(times)
    return LoopbackEcho(nbytes, pairs, sum(rate for rate, _ in measured), latency.compute_percentile_s(50))


def _connect_pair() -> tuple[socket.socket, socket.socket]:
    """Connect a pair of TCP sockets over the loopback, which send small messages without delay."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    for end in (here, there):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def _receive_in_time(
    pipe: "Connection[None, tuple[float, LatencyHistogram]]", timeout_s: float
) -> tuple[float, LatencyHistogram]:
    """Receive the rate and the latencies that a measuring process reports through its pipe.

    Raises:
        TimeoutError: nothing was received in time.
    """
    if not pipe.poll(timeout_s):
        raise TimeoutError("the loopback echo did not respond")
    return pipe.recv()


def _echo_messages(end: socket.socket, nbytes: int) -> None:
    """Send every received message back, until the other end is closed."""
    message = memoryview(bytearray(nbytes))
    while _receive_fully(end, message):
        end.sendall(message)


def _measure_round_trips(
    end: socket.socket, nbytes: int, seconds: float, pipe: "Connection[tuple[float, LatencyHistogram], None]"
) -> None:
    """Measure round trips of messages to the echoing process, one after another, for some seconds.

    A first message through the pipe reports that the process is ready; the answer starts the
    measurement. The second one has the round trips per second and their latencies.
    """
    message, times = memoryview(bytearray(nbytes)), LatencyHistogram()
    pipe.send((0.0, times))
    pipe.recv()
    durations_s: list[float] = []
    began = now = time.perf_counter()
    while now - began < seconds:
        end.sendall(message)
        _receive_fully(end, message)
        ended = time.perf_counter()
        durations_s.append(ended - now)
        now = ended
    times.add_seconds(durations_s)
    pipe.send((len(durations_s) / (now - began), times))


def _receive_fully(end: socket.socket, message: memoryview) -> bool:
    """Fill a buffer with received bytes.  Return False if the other end was closed before the buffer was full."""
    have = 0
    while have < len(message):
        got = end.recv_into(message[have:])
        if not got:
            return False
        have += got
    return True
