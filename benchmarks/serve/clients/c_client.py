"""The client in C: connections that each repeat a request as soon as its response arrived."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.serve.programs.build import compile_program
from benchmarks.serve.servers.server_processes import ServerProcess

# Longer than a turn and its last responses: a server that does not respond ends the part, not the run.
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class ClosedLoopTimes:
    """The result of a turn.

    Attributes:
        per_second: responses per second, of all connections together.
        p50_s, p99_s: median and 99th percentile of a response's time.
        client_cores: number of cores that the client kept busy.
    """

    per_second: float
    p50_s: float
    p99_s: float
    client_cores: float


class CompiledClient:
    """The compiled client, on separate cores."""

    def __init__(self, folder: Path, cores: set[int]) -> None:
        self._program = compile_program(folder, "client")
        self._request = folder / "request"
        self._cores = cores

    def run_turn(
        self,
        server: ServerProcess,
        content_type: str,
        body: bytes,
        seconds: float,
        connections: int = 1,
        fields: Mapping[str, object] = MappingProxyType({}),
    ) -> ClosedLoopTimes:
        """Send the same request to a server for `seconds`; a server without a path echoes the body.

        Args: fields: additional header fields of the request.

        Raises:
            subprocess.SubprocessError: a response was not 200, or missing.
        """
        head = f"POST {server.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._request.write_bytes(
            (f"{head}Content-Length: {len(body)}\r\n\r\n".encode() if server.path else b"") + body
        )
        kind = "http" if server.path else "raw"
        # The program has the cores of this thread.  Python code between fork and exec would meet gRPC's handlers.
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)
        try:
            said = subprocess.run(
                [self._program, kind, server.address, self._request, str(seconds), str(connections)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=seconds + _PATIENCE_S,
            )
        finally:
            os.sched_setaffinity(0, before)
        return ClosedLoopTimes(*map(float, said.stdout.split()))
