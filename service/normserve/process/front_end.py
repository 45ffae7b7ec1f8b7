"""A front end: `python -m normserve.process.front_end CHANNEL`, started by `supervisor` only.

It serves HTTP and owns no device: it relays every request to a process that owns a device and runs the
application.  It reads its settings, pickled, from standard input; connections, and links to those processes,
arrive over the channel.
"""

import asyncio
import functools
import pickle
import socket
import sys
import time
from collections.abc import Callable

import uvicorn

from normserve.errors import NormserveError, TooManyConnectionsError
from normserve.http.problems import render_problem_response
from normserve.http.relay.front_end import RelayApplication
from normserve.logs.configuration import configure_logging
from normserve.process.channel import SupervisorChannel
from normserve.process.http_server import CLOSE_S, HttpServer, make_uvicorn_config
from normserve.process.tls import TlsContext, TlsFiles
from normserve.settings import Settings

_POLL_S = 0.02


class FrontEndServer(HttpServer):
    """Serves the connections that arrive over a channel."""

    def __init__(
        self,
        config: uvicorn.Config,
        settings: Settings,
        tls: TlsContext | None,
        channel: socket.socket,
        front_end: RelayApplication,
    ) -> None:
        super().__init__(config, settings, tls)
        self._front_end = front_end
        self._channel = SupervisorChannel(
            channel,
            is_stalled=lambda: False,
            on_connection=self._take_connection,
            on_refused=lambda reason: None,
            on_link=front_end.connect,
            on_closed=self._drain_once,
        )
        front_end.on_link_lost = self._channel.request_link

    def report_refused(self, limit: str) -> None:
        """Have a connection counted that was accepted beyond this limit, and refused."""
        self._channel.report_refused(limit)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._channel.open()
        self._channel.report(ready=True)

    def _take_connection(self, connection: socket.socket, on_end: Callable[[], None], beyond: str | None) -> None:
        self._front_end.count_connections(1)
        self._spawn(self._serve_connection(connection, functools.partial(self._end_connection, on_end), beyond))

    def _end_connection(self, on_end: Callable[[], None]) -> None:
        self._front_end.count_connections(-1)
        on_end()

    def _begin_drain(self) -> None:
        self._channel.report(ready=False)

    async def _drain(self) -> None:
        give_up = time.monotonic() + CLOSE_S
        while self._front_end.is_busy and time.monotonic() < give_up:
            await asyncio.sleep(_POLL_S)
        self.should_exit = True


def main() -> int:
    """Serve; return the exit code."""
    settings, index = pickle.load(sys.stdin.buffer)
    configure_logging(settings.log_level, settings.log_format, f"front end {index}")
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.setblocking(False)
    return _run_server(settings, index, channel)


def _run_server(settings: Settings, index: int, channel: socket.socket) -> int:
    front_end = RelayApplication(index)

    def render_refusal(error: NormserveError, target: str) -> bytes:
        if isinstance(error, TooManyConnectionsError):
            server.report_refused(error.limit)
        else:
            front_end.count_refusal(error)
        return render_problem_response(error, target)

    config = make_uvicorn_config(
        settings, front_end, lifespan="off", refuse=render_refusal, on_late_departure=front_end.count_late_departure
    )
    files = TlsFiles.of(settings)
    tls = None if files is None else TlsContext(files)
    server = FrontEndServer(config, settings, tls, channel, front_end)
    server.run()
    return server.exit_code


if __name__ == "__main__":
    sys.exit(main())
