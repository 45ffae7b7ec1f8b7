"""Servers of the corpus, and the transports that lead to them."""

import contextlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.corpus.calls import NormCall
from tests.corpus.observations import ServerObserver, stable_response
from tests.corpus.transports import (
    HttpTransport,
    LocalDeviceTransport,
    LocalTransport,
    OipSharedMemoryTransport,
    OipTransport,
    Transport,
)
from tests.integration.harness import device_server
from tests.integration.harness.servers import ServerProcess, find_free_port, launch_server

TRANSPORTS: dict[str, tuple[str, ...]] = {
    "http": (),
    "http front ends": ("--frontends", "2"),
    "v2": (),
    "v2 front ends": ("--frontends", "2"),
    "v2 shared memory": (),
    "local": (),
    "local device": (),
}
"""Names of transports, and the options that the server needs for each.  `local device` replays calls."""

HTTP_TRANSPORTS = ("http", "http front ends")
LOCAL_TRANSPORTS = ("local", "local device")
_PREFIX = "corpus-"
_PATIENCE_S = 60
_ROOT = Path(__file__).parents[2]

Observation = dict[str, Any]


class CorpusServer:
    """A server of a scene, whose requests are counted and observed.

    Attributes:
        process: the server.
        folder: of the scene's files.
        observer: of its metrics and log.
    """

    def __init__(self, transport: str, process: ServerProcess, folder: Path, key: str | None) -> None:
        """Args:
        transport: its name.
        key: an API key for the server's metrics, if it needs one.
        """
        self.process = process
        self.folder = folder
        self.observer = ServerObserver(process, key)
        self._transport = transport
        self._numbers = itertools.count()
        self._connections: list[Transport] = []
        self._counted = 0

    def connect(self, transport: str | None = None) -> Any:
        """Connect, by the scene's transport if none is named; the connection is closed with the server."""
        connection = self._connection(transport or self._transport)
        connection.request_names = self.observer.request_names
        self._connections.append(connection)
        return connection

    def exchange(
        self, connection: Transport, call: NormCall, name: str | None = None, **changes: Any
    ) -> Observation:
        """Send a call, changed as stated, and return its response without what varies."""
        request_id = (name or call.name).replace(" ", "-")
        connection.send(replace(call, **changes), request_id)
        return stable_response(connection.receive(), request_id)

    def changes(self, unfinished_count: int = 0) -> Observation:
        """Return the changes of metrics and log since the last call.

        unfinished_count: requests that are in progress still.
        """
        sent = sum(connection.request_count for connection in self._connections) - unfinished_count
        ended, self._counted = sent - self._counted, sent
        return self.observer.changes(ended)

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()
        self.observer.close()

    def _connection(self, transport: str) -> Transport:
        if transport == "local":
            return LocalTransport(self.folder / "local.sock")
        if transport == "local device":
            return LocalDeviceTransport(self.folder / "local.sock")
        if transport == "v2 shared memory":
            return OipSharedMemoryTransport(self.process.address, _PREFIX, next(self._numbers))
        if transport.startswith("v2"):
            return OipTransport(self.process.address)
        return HttpTransport(self.process.address)


@contextlib.contextmanager
def start_server(
    transport: str,
    folder: Path,
    *options: str,
    script: str | None = None,
    key: str | None = None,
    waits_at_start: bool = False,
) -> Iterator[CorpusServer]:
    """Start a server that every transport of that name leads to.

    script: a file to run in place of `-m normserve`.
    key: an API key for its metrics.
    waits_at_start: whether its device waits for the gate before it starts.
    """
    if transport == "local device":
        script = str(device_server.__file__)
    sockets = ("--local", str(folder / "local.sock"), "--oip-shared-memory", _PREFIX, "--log-format", "json")
    environment = {"GATE": str(folder / "gate"), "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path])}
    port = find_free_port()
    if waits_at_start:
        environment["WAIT_AT_START"] = "1"
        options = (*options, "--port", str(port))
    process = launch_server([*sockets, *TRANSPORTS[transport], *options], environment, script)
    with contextlib.ExitStack() as stack:
        stack.callback(process.stop)
        if waits_at_start:
            process.url = f"http://127.0.0.1:{port}"
            _wait_until_listening(port)
        else:
            process.wait_until_ready()
        server = CorpusServer(transport, process, folder, key)
        stack.callback(server.close)
        yield server


def _wait_until_listening(port: int) -> None:
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < end, "the server does not listen"
            time.sleep(0.05)
