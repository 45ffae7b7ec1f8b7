"""The life of the process: listen, announce, drain, exit."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from normserve import __version__, audit
from normserve.app import Service, create_app
from normserve.errors import NormserveError
from normserve.fleet import NOT_READY, READY
from normserve.http_errors import render, status_of
from normserve.metrics import RequestRecord
from normserve.routes.status import curl_line
from normserve.settings import Settings
from normserve.transport import Manners, Patience, listen

log = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.02
# Once admitted work is drained, connections have this long to close.
_CLOSE_S = 3
# Answers that say that it is over may still leave.
_FAREWELL_S = 0.3
# A thread that compiles runs Python for a second on end, and whoever wants Python's lock meanwhile waits so long
# for it: at the default of 5 ms a server answers a tenth as often as else, at this two fifths.
_SWITCH_S = 0.0005


class Server(uvicorn.Server):
    """A uvicorn server that finishes what it admitted before it stops, and exits with a meaning."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, channel: socket.socket | None) -> None:
        super().__init__(config)
        self._channel = channel
        self._app = app
        self._service: Service = app.state.service
        self._service.engine.on_failure = self._fail
        self._background: set[asyncio.Task[None]] = set()
        self._draining = False
        self.exit_code = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets if self._channel is None else [])
        place, uds = self._service.siblings.place, self._service.settings.uds
        if place is not None:
            self.servers.append(await self._listen_on_unix_socket(place.socket_of(place.index)))
        if uds is not None:
            self.servers.append(await self._listen_on_unix_socket(uds))
        if self._channel is not None:
            asyncio.get_running_loop().add_reader(self._channel, self._receive_connection)
        self._spawn(self._announce())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain on the first signal, stop at once on the second."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        yield
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._draining:
            self.exit_code = 1
            self.should_exit = self.force_exit = True
            return
        self._draining = True
        self._tell(NOT_READY)
        audit.draining()
        log.info("draining: admitted work is finished, new work refused")
        self._service.engine.close()
        self._spawn(self._drain())

    async def _drain(self) -> None:
        give_up = time.monotonic() + self._service.settings.drain_s
        while self._service.limits.requests and time.monotonic() < give_up:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self._service.limits.requests:
            log.warning("%d requests were not finished in time", self._service.limits.requests)
            self._service.engine.give_up()
            await asyncio.sleep(_FAREWELL_S)
        self.should_exit = True

    def _protocol(self) -> Any:
        factory: Any = self.config.http_protocol_class
        return factory(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def _receive_connection(self) -> None:
        """Another process accepted it; when that one is gone, this one ends as well."""
        assert self._channel is not None
        try:
            said, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        except BlockingIOError:
            return
        except OSError:
            said, descriptors = b"", []
        if not said:
            asyncio.get_running_loop().remove_reader(self._channel)
            if not self._draining:
                self._on_signal()
            return
        for descriptor in descriptors:
            self._spawn(self._serve_connection(socket.socket(fileno=descriptor)))

    async def _serve_connection(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)

    def _tell(self, state: bytes) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(state)

    async def _listen_on_unix_socket(self, path: Path) -> asyncio.Server:
        """With the same protocol as the port; a socket that an earlier process left is replaced."""
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(self._protocol, path=path, backlog=self.config.backlog)
        log.info("listening on unix:%s", path)
        return server

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._service.settings.uds is not None:
            self._service.settings.uds.unlink(missing_ok=True)
        await super().shutdown(sockets)

    async def _announce(self) -> None:
        try:
            await self._app.state.warming
        except NormserveError as error:
            log.critical("the server cannot start: %s", error.detail)
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
            self._tell(READY)
            return
        url = self._url()
        log.info("ready on %s", url)
        if self._service.settings.log_format == "json":
            # Whoever reads lines of JSON is to get nothing else.
            return
        example = curl_line(url, with_key=self._service.keys is not None)
        print(f"\nPOST a tensor to {url}/v1/layer_norm, for example:\n\n  {example}\n", flush=True)

    def _fail(self) -> None:
        self.exit_code = 1
        self._tell(NOT_READY)
        asyncio.get_running_loop().call_later(_FAREWELL_S, setattr, self, "should_exit", True)

    def _url(self) -> str:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        # A server that listens everywhere is reached here by the loopback address.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def serve(settings: Settings, app: FastAPI | None = None, channel: socket.socket | None = None) -> int:
    """Run the server until it is told to stop; the process's exit code.

    Args:
        channel: where connections come from that another process accepts, in place of a port.
    """
    app = app or create_app(settings)
    service: Service = app.state.service

    def refuse(error: NormserveError) -> bytes:
        service.metrics.observe_request(RequestRecord(status=status_of(error), error=error.code))
        return render(error)

    patience = Patience(
        header_s=settings.header_timeout_s,
        send_s=settings.send_timeout_s,
        transfer_s=settings.transfer_timeout_s,
    )
    http: Any = listen(Manners(patience, refuse, service.metrics.observe_late_departure))
    config = uvicorn.Config(
        app.state.entrance,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=http,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=max(1, round(settings.keep_alive_s)),
        timeout_graceful_shutdown=_CLOSE_S,
    )
    server = Server(config, app, channel)
    sys.setswitchinterval(_SWITCH_S)
    audit.started(__version__, settings.shown())
    if service.keys is not None:
        audit.keys_loaded(service.keys.names)
    server.run()
    audit.ended(server.exit_code)
    return server.exit_code
