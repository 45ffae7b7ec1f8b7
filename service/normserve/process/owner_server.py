"""A server with given settings, run until it ends."""

import contextlib
import logging
import os
import socket
import sys
from typing import NoReturn

from fastapi import FastAPI

from normserve import __version__
from normserve.errors import NormserveError, TooManyConnectionsError
from normserve.errors.problems import get_status
from normserve.http.app import create_app
from normserve.http.application_services import ApplicationServices
from normserve.http.problem_responses import render_problem_response
from normserve.logs import audit
from normserve.metrics.request_metrics import RequestRecord
from normserve.process.exit_codes import ExitCode
from normserve.process.http_server import make_uvicorn_config
from normserve.process.listeners import ListenError, open_listeners, open_local_listener
from normserve.process.server import OwnerServer
from normserve.process.tls import TlsContext, TlsFiles
from normserve.settings import Settings

log = logging.getLogger(__name__)

# A thread that compiles runs Python for a whole second, and every other thread waits this long each time it needs
# the GIL.  At the default of 5 ms, throughput falls to a tenth during that time; at this value to two fifths.
_SWITCH_S = 0.0005


def run_server(settings: Settings, app: FastAPI | None = None, channel: socket.socket | None = None) -> int:
    """Run the server until a signal stops it; return the process's exit code.

    Args:
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
        on_late_departure=service.metrics.observe_late_disconnect,
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
        server = OwnerServer(config, app, listeners, stack.close, channel, tls, local_listener)
        audit.log_start(__version__, settings.dump_masked())
        if service.keyring is not None:
            audit.log_keys_loaded(service.keyring.key_names)
        try:
            server.run()
        except Exception as error:
            service.report_crash("the server ended with an unexpected error", error)
            server.exit_code = ExitCode.FAILED
        audit.log_end(server.exit_code)
    if service.engine.is_running:
        _exit_now(server.exit_code)
    return server.exit_code


def _exit_now(code: int) -> NoReturn:
    """End the process although a thread of the device still computes.

    The interpreter's own end would unwind the stack of such a thread, which in C++ code aborts the process.
    """
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
