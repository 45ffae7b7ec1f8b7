"""The server process that owns a device, from listening and announcing to draining and exit."""

import asyncio
import contextlib
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI

from normserve import __version__
from normserve.codec.forwarded_for import TrustedProxies
from normserve.engine.engine import EngineState
from normserve.errors import (
    ConfigurationError,
    DrainingError,
    NormserveError,
    NotReadyError,
    TooManyConnectionsError,
)
from normserve.errors.problems import get_status
from normserve.http.app import create_app
from normserve.http.application_services import ApplicationServices
from normserve.http.problem_responses import render_problem_response
from normserve.http.relay.relay_server import RelayServer
from normserve.local.local_server import LocalServer
from normserve.logs import audit
from normserve.metrics.request_metrics import RequestRecord
from normserve.process.child import make_owner_name
from normserve.process.connection_limits import (
    AcceptedConnection,
    ConnectionLimits,
    raise_descriptor_limit_for_connections,
)
from normserve.process.exit_codes import ExitCode
from normserve.process.gateway_process import GATEWAY, GatewayProcess, end_gateway, make_gateway_process
from normserve.process.http_server import CLOSE_S, HttpServer, make_uvicorn_config
from normserve.process.listeners import (
    ListenError,
    is_local_connection,
    make_url,
    open_listeners,
    open_local_listener,
    print_url_and_example,
)
from normserve.process.local_setup import make_local_limits, make_local_server
from normserve.process.supervisor_channel import SupervisorChannel
from normserve.process.tls import TlsContext, TlsFiles
from normserve.settings import Settings

log = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.02
# Time to send the last error responses.
_FAREWELL_S = 0.3

# A thread that compiles runs Python for a whole second, and every other thread waits this long each time it needs
# the GIL.  At the default of 5 ms, throughput falls to a tenth during that time; at this value to two fifths.
_SWITCH_S = 0.0005


class OwnerServer(HttpServer):
    """The HTTP server of a process that owns a device.  Admitted requests are finished before the server
    stops; after a failure the exit code is 1.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        listeners: Sequence[socket.socket],
        stop_listening: Callable[[], None],
        channel: socket.socket | None,
        tls: TlsContext | None,
        local_listener: socket.socket | None = None,
        gateway: GatewayProcess | None = None,
    ) -> None:
        """Args:
        listeners, channel: the source of connections, one or the other.
        local_listener: the source of connections of clients that share memory.
        gateway: the process that speaks gRPC.
        """
        self._app = app
        self._services: ApplicationServices = app.state.service
        settings = self._services.settings
        super().__init__(config, settings, tls)
        self._listeners = listeners
        self._stop_listening = stop_listening
        self._accept_tasks: list[asyncio.Task[None]] = []
        self._is_failing = False
        self._connection_limits = ConnectionLimits(
            max_all=raise_descriptor_limit_for_connections(settings.max_connections),
            max_per_address=settings.max_connections_per_address,
            on_refused=self._services.metrics.observe_refused_connection,
            proxies=TrustedProxies.parse(settings.trusted_proxies),
        )
        self._local_listener = local_listener
        self._gateway = gateway
        self._gateway_task: asyncio.Task[None] | None = None
        self._local_limits = make_local_limits(settings, self._services.metrics.observe_refused_connection)
        self._local_server: LocalServer | None = None
        self._relay_server: RelayServer = app.state.relays
        self._services.metrics.track_connections(self._count_http_connections)
        self._channel = None if channel is None else self._make_channel(channel)
        self._services.engine.on_failure = self._on_device_failure
        self._services.layer_changes.on_divergence = self._start_drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections of HTTP clients, clients that share memory, and the server's other
        processes.  A task announces readiness once the device is warm.
        """
        await super().startup([])
        asyncio.get_running_loop().set_exception_handler(self._handle_loop_error)
        if (server := await self._services.sibling_processes.start_listening()) is not None:
            self.servers.append(server)
        if self._services.settings.local is not None:
            self._local_server = make_local_server(self._services, self._app.state.describe)
        if self._channel is not None:
            self._channel.start()
        if self._local_listener is not None:
            accepting = self._local_limits.accept_connections(self._local_listener, self._serve_local)
            self._accept_tasks.append(asyncio.get_running_loop().create_task(accepting))
        for listener in self._listeners:
            accepting = self._connection_limits.accept_connections(listener, self._serve_accepted)
            self._accept_tasks.append(asyncio.get_running_loop().create_task(accepting))
        if self._gateway is not None:
            self._services.metrics.observe_restarts(GATEWAY, 0)
            self._gateway.on_restarted = functools.partial(self._services.metrics.observe_restarts, GATEWAY)
            self._gateway.on_misconfigured = lambda: self._schedule_failure_exit(ExitCode.MISCONFIGURED)
            self._gateway_task = asyncio.get_running_loop().create_task(self._gateway.keep_running())
        self._start_task(self._announce_or_end_when_warm())

    def _handle_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an exception that an event loop callback raised.  After a MemoryError the server ends, because a
        caller might wait forever.
        """
        if not isinstance(context.get("exception"), MemoryError):
            loop.default_exception_handler(context)
        elif not self._is_failing:
            log.critical("out of memory: the server ends")
            self._services.log_crash("there is no memory left to go on with", context["exception"])
            self._schedule_failure_exit()

    def _start_shutdown(self) -> None:
        """Have load balancers choose other servers for `drain_delay_s`, then start the drain.

        A process that is not ready has no requests to wait for.
        """
        if self._gateway is not None:
            # It waits for as long, and then ends its calls.
            self._gateway.request_stop()
        delay_s, engine = self._services.settings.drain_delay_s, self._services.engine
        if not delay_s or engine.state is not EngineState.READY:
            self._start_drain()
            return
        log.info("retiring: not ready from now on, requests are accepted for another %g s", delay_s)
        engine.start_retiring()
        asyncio.get_running_loop().call_later(delay_s, self._start_drain)

    def _stop_admitting(self) -> None:
        """Report that this process is not ready, and make the engine refuse new jobs.  The drain is also written
        to the audit log.
        """
        self._broadcast_readiness(ready=False)
        audit.log_drain()
        log.info("draining: admitted requests are finished, new ones are refused")
        if self._gateway is not None and not self._gateway.is_stopping:
            self._gateway.request_stop()
        self._services.engine.start_draining()

    async def _finish_requests(self) -> None:
        """Wait up to `drain_s` for admitted requests, then fail those that remain, and let the server exit."""
        give_up = time.monotonic() + self._services.settings.drain_s
        if self._gateway_task is not None:
            # Its calls may not have reached this process yet.
            await asyncio.wait((self._gateway_task,), timeout=self._services.settings.drain_s)
        while self._services.admission_budget.request_count and time.monotonic() < give_up:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self._services.admission_budget.request_count:
            log.warning("%d requests were not finished in time", self._services.admission_budget.request_count)
            self._services.engine.fail_pending_jobs()
            self._services.admission_budget.abort_bodies(
                DrainingError("the server ends before this request's body was received")
            )
            await asyncio.sleep(_FAREWELL_S)
        self.should_exit = True

    async def _serve_accepted(self, connection: socket.socket, admission: AcceptedConnection) -> None:
        """Start to serve an HTTP connection that this process accepted, and release its address at its end."""
        on_end = functools.partial(self._connection_limits.release_connection, admission.address)
        self._start_task(self._serve_connection(connection, on_end, admission.exceeded_limit))

    async def _serve_local(self, connection: socket.socket, admission: AcceptedConnection) -> None:
        """Start to serve a connection that this process accepted from a client that shares memory."""
        assert self._local_server is not None
        self._local_server.start_connection(
            connection, functools.partial(self._local_limits.release_connection, admission.address)
        )

    def _make_channel(self, channel: socket.socket) -> SupervisorChannel:
        """Make the channel over which the supervisor sends connections to this process.  When the supervisor
        ends, this process drains as well.
        """
        service, position = self._services, self._services.sibling_processes.position
        assert position is not None
        service.metrics.observe_restarts(make_owner_name(position.index), position.restarts)
        for child in position.children:
            service.metrics.observe_restarts(child, 0)
        return SupervisorChannel(
            channel,
            is_stalled=lambda: service.stall_detector.is_stalled,
            on_connection=self._serve_handed_over,
            on_refused=service.metrics.observe_refused_connection,
            on_restarted=lambda child: service.metrics.observe_restarts(position.children[child]),
            on_link=self._relay_server.serve_front_end,
            on_closed=self._start_drain,
        )

    def _serve_handed_over(
        self, connection: socket.socket, on_end: Callable[[], None], exceeded_limit: str | None
    ) -> None:
        """Serve a connection that the supervisor sent, either of an HTTP client or of one that shares memory.
        `exceeded_limit` is the limit that it exceeds, if any.
        """
        if self._local_server is not None and is_local_connection(connection, self._services.settings):
            self._local_server.start_connection(connection, on_end)
        else:
            self._start_task(self._serve_connection(connection, on_end, exceeded_limit))

    def _broadcast_readiness(self, *, ready: bool) -> None:
        """Report to the front ends, and to the supervisor if there is one, whether this process is ready."""
        self._relay_server.report_readiness(ready=ready)
        if self._channel is not None:
            self._channel.report_readiness(ready=ready)

    def _count_http_connections(self) -> int:
        """Return the number of clients' HTTP connections, both of this process and of the front ends linked to
        it.
        """
        return len(self.server_state.connections) + self._relay_server.connection_count

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting and listening, then close the connections of all kinds within a few seconds.  If the
        stop is forced, they are closed at once.
        """
        for task in self._accept_tasks:
            task.cancel()
        await asyncio.gather(*self._accept_tasks, return_exceptions=True)
        self._stop_listening()
        within_s = 0.0 if self.force_exit else CLOSE_S
        if self._gateway is not None and self._gateway_task is not None:
            await end_gateway(self._gateway, self._gateway_task, within_s)
        if self._local_server is not None:
            await self._local_server.close(within_s)
        await self._relay_server.close(within_s)
        await super().shutdown(sockets)

    async def _announce_or_end_when_warm(self) -> None:
        """Wait until the device is warm, then report readiness and print the URL.  If the device cannot start,
        end the server with an exit code for the cause.
        """
        try:
            await self._app.state.warming
        except NormserveError as error:
            log.critical("the server cannot start: %s", error.detail)
            self._schedule_failure_exit(
                ExitCode.MISCONFIGURED if isinstance(error, ConfigurationError) else ExitCode.FAILED
            )
            return
        except Exception as error:
            self._services.log_crash("the server cannot start", error)
            self._schedule_failure_exit()
            return
        engine = self._services.engine
        assert engine.device_description is not None
        log.info(
            "backend %s on %s, device copy %.1f GB/s",
            engine.backend_name,
            engine.device_description.name,
            engine.device_description.copy_bandwidth / 1e9,
        )
        if self._channel is not None:
            self._broadcast_readiness(ready=True)
            return
        url = make_url(self._listeners[0], encrypted=self._tls is not None)
        log.info("ready on %s", url)
        print_url_and_example(self._settings, url)

    def _on_device_failure(self) -> None:
        """Report that the device has failed, and end the server with exit code 1."""
        self._services.log_crash("the device failed")
        self._schedule_failure_exit()

    def _schedule_failure_exit(self, code: ExitCode = ExitCode.FAILED) -> None:
        """Set the exit code, report not ready, and end the server after a short time for the last error
        responses.
        """
        self._is_failing = True
        self.exit_code = code
        self._broadcast_readiness(ready=False)
        asyncio.get_running_loop().call_later(_FAREWELL_S, setattr, self, "should_exit", True)
        self._services.admission_budget.abort_bodies(
            NotReadyError("the server has failed, and is about to exit, before this request's body was received")
        )


def run_server(settings: Settings, app: FastAPI | None = None, channel: socket.socket | None = None) -> int:
    """Run the server of a process that owns a device.  Return the exit code after a signal has stopped the server
    or it has failed.

    Args:
        app: the application; made from the settings by default.
        channel: the source of connections that another process accepts, in place of a port.
    """
    app = app or create_app(settings)
    service: ApplicationServices = app.state.service

    def render_refusal(error: NormserveError, target: str) -> bytes:
        if isinstance(error, TooManyConnectionsError):
            service.metrics.observe_refused_connection(error.limit)
        else:
            service.metrics.observe_request(RequestRecord(status=get_status(error), error_code=error.code))
        return render_problem_response(error, target)

    config = make_uvicorn_config(
        settings,
        app.state.entrance,
        lifespan="on",
        refuse=render_refusal,
        on_unread_response_disconnect=service.metrics.observe_unread_response_disconnect,
    )
    sys.setswitchinterval(_SWITCH_S)
    with contextlib.ExitStack() as stack:
        try:
            listeners = stack.enter_context(open_listeners(settings)) if channel is None else []
            is_listening_locally = channel is None and settings.local is not None
            local_listener = stack.enter_context(open_local_listener(settings)) if is_listening_locally else None
        except ListenError as error:
            log.critical("the server cannot listen: %s", error)
            return ExitCode.MISCONFIGURED
        files = TlsFiles.from_settings(settings)
        tls = None if files is None else TlsContext(files)
        gateway = None if channel is not None else make_gateway_process(settings, listeners)
        server = OwnerServer(config, app, listeners, stack.close, channel, tls, local_listener, gateway)
        audit.log_start(__version__, settings.dump_masked())
        if service.keyring is not None:
            audit.log_keys_loaded(service.keyring.key_names)
        try:
            server.run()
        except Exception as error:
            service.log_crash("the server ended with an unexpected error", error)
            server.exit_code = ExitCode.FAILED
        audit.log_end(server.exit_code)
    if service.engine.is_running:
        _exit_now(server.exit_code)
    return server.exit_code


def _exit_now(code: int) -> NoReturn:
    """Exit without the interpreter's cleanup, because a device thread still runs.

    The interpreter's own end would unwind the stack of such a thread, which in C++ code aborts the process.
    """
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
