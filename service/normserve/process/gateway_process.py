"""The process of the gateway of gRPC: started with the server, and again whenever it ends.

`python -m normserve.process.gateway_process` is that process; it reads its settings, pickled, from standard input,
whose end means that the server has ended.
"""

import asyncio
import contextlib
import logging
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from normserve.grpc.gateway_settings import GatewaySettings
from normserve.process.connection_limits import raise_descriptor_limit_for_connections
from normserve.process.exit_codes import ExitCode, describe_exit
from normserve.settings import Settings, make_device_environment

_MODULE = "normserve.process.gateway_process"

# Not by `__name__`, which is `__main__` in the gateway's own process.
log = logging.getLogger(_MODULE)

GATEWAY = "gateway"
"""The gateway's name in logs, and among the processes whose restarts are counted."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
# A process that ran for this long did not fail at its start.
_STEADY_S = 60.0
# The server has finished its requests by then; the rest is sending their results.
_END_S = 3.0


class GatewayProcess:
    """The gateway's process, as the server sees it.

    Attributes:
        is_stopping: whether it was asked to stop.
        on_misconfigured: called once if the first process cannot start with its settings, as if its port is in use.
        on_restarted: called each time before the process is started again.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._subprocess: asyncio.subprocess.Process | None = None
        self.is_stopping = False
        self.on_misconfigured: Callable[[], None] = lambda: None
        self.on_restarted: Callable[[], None] = lambda: None

    async def keep_running(self) -> None:
        """Run the process, and start it again whenever it ends, after a pause that grows.  Return when it was asked
        to stop and has ended, or cannot start.
        """
        pause, has_started = _FIRST_PAUSE_S, False
        while not self.is_stopping:
            began = time.monotonic()
            code = await self._run_process()
            if self.is_stopping:
                return
            if code == ExitCode.MISCONFIGURED and not has_started:
                self.on_misconfigured()
                return
            has_started = True
            pause = _FIRST_PAUSE_S if time.monotonic() - began > _STEADY_S else min(2 * pause, _LONGEST_PAUSE_S)
            assert self._subprocess is not None
            ended = {"child": GATEWAY, "pid": self._subprocess.pid, **describe_exit(code)}
            log.error("%s ended and is started again in %.1f s", GATEWAY, pause, extra={"fields": ended})
            self.on_restarted()
            await asyncio.sleep(pause)

    def request_stop(self) -> None:
        """Have the process finish its calls and end; the second time, have it end at once."""
        self.is_stopping = True
        if self._subprocess is not None and self._subprocess.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._subprocess.send_signal(signal.SIGTERM)

    async def _run_process(self) -> int:
        """Start the process, and wait until it ends; return its exit code."""
        self._subprocess = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULE),
            stdin=asyncio.subprocess.PIPE,
            env=make_device_environment("cpu"),
            # The server alone receives a terminal's interrupt, and signals the others.
            start_new_session=True,
        )
        assert self._subprocess.stdin is not None
        self._subprocess.stdin.write(pickle.dumps(self._settings))
        try:
            return await self._subprocess.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                self._subprocess.kill()
            raise


def make_gateway_process(settings: Settings, listeners: Sequence[socket.socket]) -> GatewayProcess | None:
    """Make the gateway's process for a server with these listeners; None if the settings have no port for it."""
    if settings.grpc_port is None:
        return None
    # An empty host is all addresses.
    host = settings.host or "::"
    if ":" in host:
        host = f"[{host}]"
    path = next(each.getsockname() for each in listeners if each.family == socket.AF_UNIX)
    return GatewayProcess(
        GatewaySettings.from_settings(settings, f"{host}:{settings.grpc_port}", f"http+unix://{path}")
    )


async def end_gateway(gateway: GatewayProcess, running: asyncio.Task[None], within_s: float = _END_S) -> None:
    """End the gateway's process: its calls have `within_s` seconds, if it was not asked to stop before.

    Args: running: the task of `keep_running`.
    """
    if not gateway.is_stopping:
        gateway.request_stop()
    await asyncio.wait((running,), timeout=within_s)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def limit_gateway_connections(settings: GatewaySettings) -> GatewaySettings:
    """Raise this process's limit of open files for a gateway; return the settings with the connections that fit."""
    # A late import: the server's process starts without gRPC.
    from normserve.grpc.server_client import MAX_SERVER_CONNECTIONS

    possible = raise_descriptor_limit_for_connections(settings.max_connections, outgoing=MAX_SERVER_CONNECTIONS)
    return replace(settings, max_connections=possible)


def main() -> int:
    """Run the gateway with the settings from standard input; return the exit code."""
    # Late imports: the server's process starts without gRPC.
    from normserve.grpc.gateway import GatewayError, run_gateway
    from normserve.logs.formatting import configure_logging

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    settings: GatewaySettings = pickle.load(sys.stdin.buffer)
    configure_logging(settings.log_level, settings.log_format, "grpc")
    try:
        run_gateway(limit_gateway_connections(settings), sys.stdin.fileno())
    except GatewayError as error:
        log.critical("the gateway of gRPC cannot start: %s", error)
        return ExitCode.MISCONFIGURED
    return ExitCode.STOPPED


if __name__ == "__main__":
    sys.exit(main())
