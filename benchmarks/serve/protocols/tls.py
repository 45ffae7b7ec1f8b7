"""The cost of TLS: `python -m benchmarks.serve.protocols.tls --out FILE.csv`.

Two servers, one with TLS, run at once on the same cores; one connection to each is kept alive, npy in and out,
LayerNorm of [rows, 1024] float32 with a registered layer.  In each round each has a turn, in an order that changes
from round to round.  The client uses Python's blocking sockets for both, on other cores; the times include its own
encryption, as in any use of TLS.  The first response of each connection is compared with torch's.
"""

import argparse
import contextlib
import os
import random
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness.csv_results import CsvResults
from benchmarks.serve import command
from benchmarks.serve.clients.checked_requests import check_response, encode_npy, make_parameters, make_x
from benchmarks.serve.command import SIZES
from benchmarks.serve.servers import server_processes
from benchmarks.serve.servers.certificates import write_certificates
from benchmarks.serve.servers.server_processes import ServerProcess

COLUMNS = (
    "size",
    "nbytes",
    "transport",
    "cipher",
    "round",
    "per_second",
    "p50_ms",
    "bytes_per_second",
    "p50_over_tcp",
)
_PIECE_BYTES = 256 * 1024


def main() -> int:
    options = command.make_parser("the servers and of the client")
    command.add_size_option(options)
    command.add_turn_options(options, "each server at each size", 1.5)
    options.add_argument("--backend", default="torch", help="of both servers: torch or triton")
    return command.run_command(options.parse_args(), COLUMNS, measure, format_table)


def measure(results: CsvResults, folder: Path, asked: argparse.Namespace) -> None:
    """Run everything; a row for each transport, size and round."""
    server_cores, client_cores = asked.cores
    parameters = make_parameters()
    with contextlib.ExitStack() as stack:
        contexts: dict[str, ssl.SSLContext | None] = {"tcp": None, "tls": write_certificates(folder)}
        served = {}
        for transport, context in contexts.items():
            own = folder / transport
            own.mkdir()
            options = () if context is None else ("--tls-cert", str(folder / "server.pem"))
            running = server_processes.run_normserve(
                server_cores, own, parameters, asked.backend, options, trust=context
            )
            served[transport] = stack.enter_context(running)[0]
        os.sched_setaffinity(0, client_cores)
        for size in asked.size or SIZES:
            with results.run_part(size):
                x = make_x(SIZES[size])
                with contextlib.ExitStack() as opened:
                    lines = {
                        transport: opened.enter_context(_open_connection(served[transport], context, encode_npy(x)))
                        for transport, context in contexts.items()
                    }
                    for line in lines.values():
                        check_response(x, parameters, bytes(line.send()))
                    for number in range(asked.rounds):
                        _time_round(results, lines, size, number, asked.seconds)


class RepeatedRequest:
    """A kept-alive connection that repeats the same request."""

    def __init__(self, connection: socket.socket, request: bytes, body_bytes: int) -> None:
        self._connection = connection
        self._request = request
        self._answer = memoryview(bytearray(body_bytes + 4096))
        self.body_bytes = body_bytes
        cipher = connection.cipher() if isinstance(connection, ssl.SSLSocket) else None
        self.cipher = cipher[0] if cipher else ""

    def send(self) -> memoryview:
        """Send the request and read the whole response; return its body.

        Raises:
            RuntimeError: the response was not 200, or incomplete.
        """
        self._connection.sendall(self._request)
        came, expected, start = 0, None, 0
        while expected is None or came < expected:
            got = self._connection.recv_into(self._answer[came : came + _PIECE_BYTES])
            if not got:
                raise RuntimeError("the server closed within an answer")
            came += got
            if expected is None and (end := bytes(self._answer[: min(came, 4096)]).find(b"\r\n\r\n")) >= 0:
                head = bytes(self._answer[:end]).lower()
                if not head.startswith(b"http/1.1 200"):
                    raise RuntimeError(head.decode("latin-1"))
                start = end + 4
                expected = start + int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return self._answer[start:expected]


@contextlib.contextmanager
def _open_connection(
    server: ServerProcess, context: ssl.SSLContext | None, body: bytes
) -> Iterator[RepeatedRequest]:
    head = f"POST {server.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-npy\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", int(server.address))) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is None:
            yield RepeatedRequest(plain, request, len(body))
            return
        with context.wrap_socket(plain, server_hostname="localhost") as encrypted:
            yield RepeatedRequest(encrypted, request, len(body))


def _time_round(
    results: CsvResults, lines: Mapping[str, RepeatedRequest], size: str, number: int, seconds: float
) -> None:
    times = {
        transport: _run_turn(lines[transport], seconds) for transport in random.Random(number).sample([*lines], 2)
    }
    for transport, line in lines.items():
        p50 = median(times[transport])
        per_second = len(times[transport]) / sum(times[transport])
        results.add_row(
            {
                "size": size,
                "nbytes": line.body_bytes,
                "transport": transport,
                "cipher": line.cipher,
                "round": number,
                "per_second": f"{per_second:.2f}",
                "p50_ms": f"{p50 * 1000:.4f}",
                "bytes_per_second": f"{2 * line.body_bytes * per_second:.0f}",
                "p50_over_tcp": f"{p50 / median(times['tcp']):.3f}",
            }
        )


def _run_turn(line: RepeatedRequest, seconds: float) -> list[float]:
    """The time of each response; those of the first fifth are dropped, but at least one is kept."""
    times: list[float] = []
    began = time.perf_counter()
    while not times or time.perf_counter() - began < seconds:
        sent = time.perf_counter()
        line.send()
        if sent - began >= seconds / 5:
            times.append(time.perf_counter() - sent)
    return times


def format_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A line for each size: p50 over each transport, and the median of their ratios within a round."""
    lines = ["| | TCP, p50 ms | TLS, p50 ms | TLS over TCP |", "|---|---|---|---|"]
    for size in dict.fromkeys(str(row["size"]) for row in rows):
        of = {
            transport: [row for row in rows if (row["size"], row["transport"]) == (size, transport)]
            for transport in ("tcp", "tls")
        }
        cells = [f"{median(float(str(row['p50_ms'])) for row in each):.3g}" for each in of.values()]
        ratios = [float(str(row["p50_over_tcp"])) for row in of["tls"]]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {size} | {cells[0]} | {cells[1]} | {spread} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
