"""A server of settings, run until it ends."""

import contextlib
import logging
import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI

from normserve import __version__
from normserve.errors import NormserveError
from normserve.http.app import Service, create_app
from normserve.http.problems import NO_SNIFFING, render
from normserve.http.transport import Manners, Patience, listen
from normserve.logs import audit
from normserve.metrics.requests import RequestRecord
from normserve.problems import status_of
from normserve.process.listeners import listening, listening_locally
from normserve.process.server import CLOSE_S, Server
from normserve.process.tls import TlsContext, TlsFiles
from normserve.settings import Settings

log = logging.getLogger(__name__)

# A thread that compiles runs Python for a second on end, and whoever wants Python's lock meanwhile waits so long
# for it: at the default of 5 ms a server answers a tenth as often as else, at this two fifths.
_SWITCH_S = 0.0005


def serve(settings: Settings, app: FastAPI | None = None, channel: socket.socket | None = None) -> int:
    """Run the server until it is told to stop; the process's exit code.

    Args:
        channel: where connections come from that another process accepts, in place of a port.
    """
    app = app or create_app(settings)
    service: Service = app.state.service

    def refuse(error: NormserveError, target: str) -> bytes:
        service.metrics.observe_request(RequestRecord(status=status_of(error), error=error.code))
        return render(error, target)

    patience = Patience(
        header_s=settings.header_timeout_s,
        send_s=settings.send_timeout_s,
        transfer_s=settings.transfer_timeout_s,
        min_bytes_per_s=settings.min_body_bytes_per_s,
        grace_s=settings.body_grace_s,
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
        headers=[(name.decode(), value.decode()) for name, value in (NO_SNIFFING,)],
        proxy_headers=False,
        timeout_keep_alive=max(1, round(settings.keep_alive_s)),
        timeout_graceful_shutdown=CLOSE_S,
    )
    sys.setswitchinterval(_SWITCH_S)
    with contextlib.ExitStack() as stack:
        try:
            listeners = stack.enter_context(listening(settings)) if channel is None else []
            is_listening_locally = channel is None and settings.local is not None
            local_listener = stack.enter_context(listening_locally(settings)) if is_listening_locally else None
        except OSError as error:
            log.critical("the server cannot listen: %s", error)
            return 1
        files = TlsFiles.of(settings)
        tls = None if files is None else TlsContext(files)
        server = Server(config, app, listeners, stack.close, channel, tls, local_listener)
        audit.started(__version__, settings.shown())
        if service.keys is not None:
            audit.keys_loaded(service.keys.names)
        server.run()
        audit.ended(server.exit_code)
    return server.exit_code
