"""The life of the process: listen, announce, drain, exit."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from normserve.errors import NormserveError
from normserve.http.app import Service
from normserve.http.routes.status import curl_line
from normserve.http.transport import Connection
from normserve.local.server import LocalServer
from normserve.logs import audit
from normserve.process.channel import Channel
from normserve.process.connections import ConnectionLimits, connections_for_descriptors
from normserve.process.listeners import is_local, url_of
from normserve.process.local_clients import local_limits, local_server
from normserve.process.tls import TlsContext, TlsFileError

log = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.02
# Once admitted work is drained, connections have this long to close.
CLOSE_S = 3
# Answers that say that it is over may still leave.
_FAREWELL_S = 0.3


class Server(uvicorn.Server):
    """A uvicorn server that finishes what it admitted before it stops, and exits with a meaning."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        listeners: Sequence[socket.socket],
        stop_listening: Callable[[], None],
        channel: socket.socket | None,
        tls: TlsContext | None,
        local_listener: socket.socket | None = None,
    ) -> None:
        """Args:
        listeners, channel: where connections come from, the one or the other.
        local_listener: where those of clients come from that share memory.
        """
        super().__init__(config)
        self._listeners = listeners
        self._stop_listening = stop_listening
        self._accepting: list[asyncio.Task[None]] = []
        self._is_failing = False
        self._tls = tls
        self._app = app
        self._service: Service = app.state.service
        settings = self._service.settings
        self._limits = ConnectionLimits(
            max_all=connections_for_descriptors(settings.max_connections),
            max_per_address=settings.max_connections_per_address,
            on_refused=self._service.metrics.observe_refused_connection,
        )
        self._local_listener = local_listener
        self._local_limits = local_limits(settings, self._service.metrics.observe_refused_connection)
        self._local: LocalServer | None = None
        self._service.metrics.watch_connections(lambda: len(self.server_state.connections))
        self._channel = None if channel is None else self._channel_of(channel)
        self._service.engine.on_failure = self._fail
        self._service.changes.on_divergence = self._drain_once
        self._background: set[asyncio.Task[None]] = set()
        self._draining = False
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        asyncio.get_running_loop().set_exception_handler(self._note_error_of_loop)
        if (server := await self._service.siblings.listen()) is not None:
            self.servers.append(server)
        if self._service.settings.local is not None:
            self._local = local_server(self._service, self._app.state.describe)
        if self._channel is not None:
            self._channel.open()
        if self._local_listener is not None:
            accepting = self._local_limits.accept(self._local_listener, self._take_local)
            self._accepting.append(asyncio.get_running_loop().create_task(accepting))
        for listener in self._listeners:
            accepting = self._limits.accept(listener, self._take_connection)
            self._accepting.append(asyncio.get_running_loop().create_task(accepting))
        self._spawn(self._announce())

    def _note_error_of_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What a callback raised.  One that found no memory may have left somebody waiting for ever."""
        if not isinstance(context.get("exception"), MemoryError):
            loop.default_exception_handler(context)
        elif not self._is_failing:
            log.critical("there is no memory left to go on with: the server ends")
            self._fail()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain on the first signal, stop at once on the second."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if self._tls is not None:
            loop.add_signal_handler(signal.SIGHUP, self._read_certificate_again)
        yield
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._draining:
            self.exit_code = 1
            self.should_exit = self.force_exit = True
            return
        self._drain_once()

    def _drain_once(self) -> None:
        """Begin to drain, unless that has begun."""
        if self._draining:
            return
        self._draining = True
        self._tell(ready=False)
        audit.draining()
        log.info("draining: admitted work is finished, new work refused")
        self._service.engine.close()
        self._spawn(self._drain())

    def _read_certificate_again(self) -> None:
        assert self._tls is not None
        try:
            self._tls.reload()
        except TlsFileError as error:
            log.error("the TLS files stay as they were read before: %s", error)
        else:
            log.info("the TLS files are read again: new connections use them")

    async def _drain(self) -> None:
        give_up = time.monotonic() + self._service.settings.drain_s
        while self._service.limits.requests and time.monotonic() < give_up:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self._service.limits.requests:
            log.warning("%d requests were not finished in time", self._service.limits.requests)
            self._service.engine.give_up()
            await asyncio.sleep(_FAREWELL_S)
        self.should_exit = True

    def _protocol(self) -> Connection:
        factory: Any = self.config.http_protocol_class
        protocol: Connection = factory(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def _take_connection(self, connection: socket.socket, address: str) -> None:
        """This process accepted it."""
        self._spawn(self._serve_connection(connection, functools.partial(self._limits.release, address)))

    async def _take_local(self, connection: socket.socket, address: str) -> None:
        """This process accepted it, of a client that shares memory."""
        assert self._local is not None
        self._local.serve(connection, functools.partial(self._local_limits.release, address))

    def _channel_of(self, channel: socket.socket) -> Channel:
        """Connections that another process accepts; when that one is gone, this one ends as well."""
        service = self._service
        return Channel(
            channel,
            is_stalled=lambda: service.stalls.is_stalled,
            on_connection=self._serve_handed_over,
            on_refused=service.metrics.observe_refused_connection,
            on_closed=self._drain_once,
        )

    def _serve_handed_over(self, connection: socket.socket, on_end: Callable[[], None]) -> None:
        if self._local is not None and is_local(connection, self._service.settings):
            self._local.serve(connection, on_end)
        else:
            self._spawn(self._serve_connection(connection, on_end))

    async def _serve_connection(self, connection: socket.socket, on_end: Callable[[], None]) -> None:
        protocol = self._protocol()
        protocol.on_lost = on_end
        handshake = {} if connection.family == socket.AF_UNIX else self._handshake()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection, **handshake)
        except OSError:
            # Gone before it was a connection, or without a handshake, of which TLS has told it why.
            connection.close()
            on_end()

    def _handshake(self) -> dict[str, Any]:
        """What the event loop is told about TLS; nothing where there is none."""
        if self._tls is None:
            return {}
        settings = self._service.settings
        return {
            "ssl": self._tls,
            "ssl_handshake_timeout": settings.header_timeout_s,
            # The rest of a response may leave until then.
            "ssl_shutdown_timeout": settings.send_timeout_s,
        }

    def _tell(self, *, ready: bool) -> None:
        """Let the process that accepts connections know, if there is one."""
        if self._channel is not None:
            self._channel.tell(ready=ready)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        self._stop_listening()
        if self._local is not None:
            await self._local.close(0.0 if self.force_exit else CLOSE_S)
        await super().shutdown(sockets)

    async def _announce(self) -> None:
        try:
            await self._app.state.warming
        except NormserveError as error:
            log.critical("the server cannot start: %s", error.detail)
            self._fail()
            return
        except Exception:
            log.critical("the server cannot start", exc_info=True)
            self._fail()
            return
        engine = self._service.engine
        assert engine.device is not None
        log.info(
            "backend %s on %s, device copy %.1f GB/s",
            engine.backend_name,
            engine.device.name,
            engine.device.copy_bandwidth / 1e9,
        )
        if self._channel is not None:
            self._tell(ready=True)
            return
        settings = self._service.settings
        url = url_of(self._listeners[0], encrypted=self._tls is not None)
        log.info("ready on %s", url)
        if settings.log_format == "json":
            # Whoever reads lines of JSON is to get nothing else.
            return
        with_certificate = settings.tls_client_ca is not None
        example = curl_line(url, with_key=self._service.keys is not None, with_certificate=with_certificate)
        print(f"\nPOST a tensor to {url}/v1/layer_norm, for example:\n\n  {example}\n", flush=True)

    def _fail(self) -> None:
        self._is_failing = True
        self.exit_code = 1
        self._tell(ready=False)
        asyncio.get_running_loop().call_later(_FAREWELL_S, setattr, self, "should_exit", True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
