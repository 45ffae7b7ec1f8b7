"""Servers of other makers: how they are started, and what they speak."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from normload.run import Target

from benchmarks.serve.servers.launch import TUNED_MALLOC, process

_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Other:
    """A server that a package provides.

    Attributes:
        package: what must be installed.
        module: of this folder, which serves with it.
        path: that takes tensors.
        ready: that answers 200 once it does.
        adapter: of normload, that speaks to it.
    """

    package: str
    module: str
    path: str
    ready: str
    adapter: str


OTHERS = {
    "litserve": Other("litserve", "benchmarks.peers.lit", "/predict", "/health", "npy"),
    "nvidia-triton": Other(
        "pytriton",
        "benchmarks.peers.triton_server",
        "/v2/models/layer_norm",
        "/v2/models/layer_norm/ready",
        "kserve",
    ),
}


@dataclass(frozen=True, slots=True)
class Running:
    """A server that runs, in a process group of its own.

    Attributes:
        target: how it is reached.
        pid: of its first process, and of the group.
    """

    target: Target
    pid: int

    def sleep(self) -> None:
        """Stop all its processes; some poll while nobody asks them, and all share cores."""
        os.killpg(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """Let them go on."""
        os.killpg(self.pid, signal.SIGCONT)


@contextlib.contextmanager
def other(started: Other, interpreter: str, cores: set[int], parameters: Path, device: str) -> Iterator[Running]:
    """Run one on a free port of this machine, with malloc tuned in its favour; yield it when it is ready.

    Raises:
        TimeoutError: it did not become so.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [interpreter, "-m", started.module, str(parameters), device, str(port)]
    with process(command, cores, TUNED_MALLOC) as running:
        url = f"http://127.0.0.1:{port}"
        _wait(url + started.ready)
        yield Running(Target(url + started.path, started.adapter), running.pid)


def _wait(url: str) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url} did not answer within {_START_S:g} s")
