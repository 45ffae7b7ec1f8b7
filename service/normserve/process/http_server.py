"""An HTTP server for connections that another object accepts; it drains before it ends."""

import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from normserve.codec.forwarded_for import TrustedProxies
from normserve.errors import NormserveError
from normserve.hangups import handle_hangups
from normserve.http.problem_responses import NO_SNIFFING
from normserve.http.transport import (
    ConnectionPolicy,
    ConnectionTimeouts,
    DiscardLimits,
    HttpConnection,
    make_connection_factory,
)
from normserve.process.connection_limits import identify_client
from normserve.process.exit_codes import ExitCode
from normserve.process.tls import TlsContext, TlsFileError, log_ignored_reload
from normserve.settings import Settings

log = logging.getLogger(__name__)

# Once admitted work is drained, connections have this long to close.
CLOSE_S = 3


class HttpServer(uvicorn.Server):
    """A uvicorn server for connections that other code accepts.  At a signal the server finishes admitted
    requests before it ends.
    """

    def __init__(self, config: uvicorn.Config, settings: Settings, tls: TlsContext | None) -> None:
        super().__init__(config)
        self._settings = settings
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_received_signal = self._is_draining = False
        self.exit_code = ExitCode.STOPPED

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals within the block: drain after the first SIGTERM or SIGINT, stop at once at the second, and
        reload TLS files, if there are any, at SIGHUP.  A fatal signal prints each thread's traceback.
        """
        faulthandler.enable()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        with handle_hangups(self._reload_tls):
            yield
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    @abstractmethod
    async def _finish_requests(self) -> None:
        """Wait until the admitted requests have been answered, then set `should_exit`."""

    def _stop_admitting(self) -> None:
        """Stop taking new requests, as the first step of a drain; subclasses implement this."""

    def _on_signal(self, number: signal.Signals) -> None:
        """Begin to end at the first signal; at the second, or in a drain, end at once with exit code 1."""
        is_second = self._has_received_signal or self._is_draining
        log.info("%s came%s", number.name, ", again: the server ends at once" if is_second else "")
        if is_second:
            self.exit_code = ExitCode.FAILED
            self.should_exit = self.force_exit = True
            return
        self._has_received_signal = True
        self._start_shutdown()

    def _start_shutdown(self) -> None:
        """Start the drain, after a signal; a subclass may do so later."""
        self._start_drain()

    def _start_drain(self) -> None:
        """Start to drain: announce it, and finish the admitted requests in a task.  A second call does nothing."""
        if self._is_draining:
            return
        self._is_draining = True
        self._stop_admitting()
        self._start_task(self._finish_requests())

    def _reload_tls(self) -> None:
        """Read the TLS files again, for new connections; if they are invalid, log an error and keep the old
        ones.  Without TLS, only log that there are none.
        """
        if self._tls is None:
            log_ignored_reload()
            return
        try:
            self._tls.reload_files()
        except TlsFileError as error:
            log.error("the new TLS files cannot be used, the old ones stay in use: %s", error)
        else:
            log.info("reloaded the TLS files: new connections use them")

    async def _serve_connection(
        self, connection: socket.socket, on_end: Callable[[], None], exceeded_limit: str | None
    ) -> None:
        """Set up HTTP on a connection; with TLS, the handshake is done first.  `on_end` is called when the
        connection has ended.

        Returns once the connection is set up, not at its end.

        Args:
            exceeded_limit: the limit that it exceeds.
        """
        factory: Any = self.config.http_protocol_class
        protocol: HttpConnection = factory(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        protocol.on_connection_lost = on_end
        header_s = protocol.admit(identify_client(connection), exceeded_limit)
        handshake = {} if connection.family == socket.AF_UNIX else self._make_tls_options(header_s)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection, **handshake)
        except OSError:
            # The client disconnected early, or the handshake failed, in which case TLS has sent an alert.
            connection.close()
            on_end()

    def _make_tls_options(self, timeout_s: float) -> dict[str, Any]:
        """Return the TLS arguments for asyncio's `connect_accepted_socket`; {} if the server uses plain HTTP."""
        if self._tls is None:
            return {}
        return {
            "ssl": self._tls,
            "ssl_handshake_timeout": timeout_s,
            # The rest of a response may be sent until then.
            "ssl_shutdown_timeout": self._settings.send_timeout_s,
        }

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task and keep a reference to it until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def make_uvicorn_config(
    settings: Settings,
    entrance: Callable[..., Any],
    *,
    lifespan: str,
    refuse: Callable[[NormserveError, str], bytes],
    on_unread_response_disconnect: Callable[[], None],
) -> uvicorn.Config:
    """Make uvicorn's configuration from the settings, with the project's own HTTP protocol class.

    Args:
        entrance: the ASGI application.
        lifespan: uvicorn's option, "on" or "off".
        refuse, on_unread_response_disconnect: as in `ConnectionPolicy`.
    """
    patience = ConnectionTimeouts(
        header_s=settings.header_timeout_s,
        send_s=settings.send_timeout_s,
        transfer_s=settings.transfer_timeout_s,
        min_bytes_per_s=settings.min_body_bytes_per_s,
        grace_s=settings.body_grace_s,
    )
    # A body that is somewhat too long is received to its end, so that its client learns of the limit.
    drains = DiscardLimits(2 * settings.max_body_bytes)
    policy = ConnectionPolicy(
        patience,
        drains,
        refuse,
        on_unread_response_disconnect,
        root_path=settings.root_path.encode(),
        proxies=TrustedProxies.parse(settings.trusted_proxies),
    )
    http: Any = make_connection_factory(policy)
    return uvicorn.Config(
        entrance,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=http,
        ws="none",
        lifespan=lifespan,  # type: ignore[arg-type]
        access_log=False,
        log_config=None,
        server_header=False,
        headers=[(name.decode(), value.decode()) for name, value in (NO_SNIFFING,)],
        proxy_headers=False,
        timeout_keep_alive=max(1, round(settings.keep_alive_s)),
        timeout_graceful_shutdown=CLOSE_S,
    )
