"""Servers of other makers: how they are started, and their protocols."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from normload.load_run import TargetServer

from benchmarks.serve.servers.server_processes import TUNED_MALLOC, run_process

_START_S = 60.0


@dataclass(frozen=True, slots=True)
class PeerServer:
    """A server that a package provides.

    Attributes:
        package: what must be installed.
        module: the module of this folder that runs it.
        path: of requests with tensors.
        ready_path: path that returns 200 once the server is ready.
        adapter: normload's adapter for its protocol.
    """

    package: str
    module: str
    path: str
    ready_path: str
    adapter: str


OTHERS = {
    "litserve": PeerServer("litserve", "benchmarks.peers.litserve_server", "/predict", "/health", "npy"),
    "nvidia-triton": PeerServer(
        "pytriton",
        "benchmarks.peers.triton_server",
        "/v2/models/layer_norm",
        "/v2/models/layer_norm/ready",
        "kserve",
    ),
}


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server, in a separate process group.

    Attributes:
        target: its address and protocol.
        pid: of its first process, and of the group.
    """

    target: TargetServer
    pid: int

    def suspend(self) -> None:
        """Stop all its processes; some poll while idle, and all servers share cores."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue its processes."""
        os.killpg(self.pid, signal.SIGCONT)


@contextlib.contextmanager
def run_peer(
    started: PeerServer, interpreter: str, cores: set[int], parameters: Path, device: str, *more: str
) -> Iterator[RunningServer]:
    """Run one on a free port of this machine, with malloc tuned for it; yield it when it is ready.

    Args: more: further arguments of its command line.

    Raises:
        TimeoutError: it did not become ready.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [interpreter, "-m", started.module, str(parameters), device, str(port), *more]
    with run_process(command, cores, TUNED_MALLOC) as running:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url + started.ready_path)
        yield RunningServer(TargetServer(url + started.path, started.adapter), running.pid)


def _wait_until_ready(url: str) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url} did not answer within {_START_S:g} s")
