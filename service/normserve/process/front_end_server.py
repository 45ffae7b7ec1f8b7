"""A front end: `python -m normserve.process.front_end_server CHANNEL`, started by `supervisor` only.

It serves HTTP and owns no device: it relays every request to a process that owns a device and runs the
application.  It reads its settings, pickled, from standard input; connections, and links to those processes,
arrive over the channel.
"""

import asyncio
import functools
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable

import uvicorn

from normserve.errors import NormserveError, TooManyConnectionsError
from normserve.http.problem_responses import render_problem_response
from normserve.http.relay.front_end import RelayApplication
from normserve.logs.formatting import configure_logging
from normserve.process.http_server import CLOSE_S, HttpServer, make_uvicorn_config
from normserve.process.supervisor_channel import SupervisorChannel
from normserve.process.tls import TlsContext, TlsFiles
from normserve.settings import Settings

_POLL_S = 0.02


class FrontEndServer(HttpServer):
    """The HTTP server of a front end process, which owns no device.  The supervisor sends it connections,
    and the requests are relayed to the processes that own devices.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        settings: Settings,
        tls: TlsContext | None,
        channel: socket.socket,
        front_end: RelayApplication,
    ) -> None:
        super().__init__(config, settings, tls)
        self._relay_application = front_end
        self._channel = SupervisorChannel(
            channel,
            is_stalled=lambda: False,
            on_connection=self._serve_handed_over,
            on_refused=lambda reason: None,
            on_restarted=lambda child: None,
            on_link=front_end.connect_owner,
            on_closed=self._start_drain,
        )
        front_end.on_link_lost = self._channel.request_link

    def report_refused_connection(self, limit: str) -> None:
        """Report to the supervisor that this front end refused a connection because of `limit`, so that the
        refusal is counted in the metrics.
        """
        self._channel.report_refused_connection(limit)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the HTTP server without listeners, and begin to receive connections from the supervisor."""
        await super().startup([])
        self._channel.start()
        self._channel.report_readiness(ready=True)

    def _serve_handed_over(
        self, connection: socket.socket, on_end: Callable[[], None], exceeded_limit: str | None
    ) -> None:
        """Count a connection that the supervisor sent, and start a task that serves it.  `exceeded_limit` is the
        limit that it exceeds, if any.
        """
        self._relay_application.adjust_connection_count(1)
        self._start_task(
            self._serve_connection(connection, functools.partial(self._on_connection_end, on_end), exceeded_limit)
        )

    def _on_connection_end(self, on_end: Callable[[], None]) -> None:
        """Count the end of a connection and report it to the supervisor."""
        self._relay_application.adjust_connection_count(-1)
        on_end()

    def _stop_admitting(self) -> None:
        """Report to the supervisor that this front end takes no more connections."""
        self._channel.report_readiness(ready=False)

    async def _finish_requests(self) -> None:
        """Wait a few seconds at most for the relayed requests in progress, then let the server exit."""
        give_up = time.monotonic() + CLOSE_S
        while self._relay_application.is_busy and time.monotonic() < give_up:
            await asyncio.sleep(_POLL_S)
        self.should_exit = True


def main() -> int:
    """Run a front end with the settings from standard input and the channel from the command line; return
    the exit code.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    settings, index = pickle.load(sys.stdin.buffer)
    configure_logging(settings.log_level, settings.log_format, f"front end {index}")
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.setblocking(False)
    return _run_server(settings, index, channel)


def _run_server(settings: Settings, index: int, channel: socket.socket) -> int:
    """Make the front end's application and server and run the server until it has drained; return the exit code."""
    front_end = RelayApplication(index)

    def render_refusal(error: NormserveError, target: str) -> bytes:
        if isinstance(error, TooManyConnectionsError):
            server.report_refused_connection(error.limit)
        else:
            front_end.count_refusal(error)
        return render_problem_response(error, target)

    config = make_uvicorn_config(
        settings,
        front_end,
        lifespan="off",
        refuse=render_refusal,
        on_unread_response_disconnect=front_end.count_unread_response_disconnect,
    )
    files = TlsFiles.from_settings(settings)
    tls = None if files is None else TlsContext(files)
    server = FrontEndServer(config, settings, tls, channel, front_end)
    server.run()
    return server.exit_code


if __name__ == "__main__":
    sys.exit(main())
