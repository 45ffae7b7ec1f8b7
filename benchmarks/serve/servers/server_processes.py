"""Starts the servers of a run."""

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import httpx
import numpy as np
from normserve.client import Client

LAYER = "bench"

# By default glibc returns large memory to the kernel at each free, and faults it in again at the next request.
TUNED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}


# A cold start compiles every kernel of the configuration.
_START_S = 420.0
# Longer than a drain.
_END_S = 40.0


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server and its address.

    Attributes:
        address: a port, or the path of a socket.
        path: of the URL; empty for a server without HTTP.
        pid: of its process.
    """

    name: str
    address: str
    path: str
    pid: int


@contextlib.contextmanager
def run_process(
    command: list[str], cores: set[int], environment: Mapping[str, str], stdin: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process on these cores, ended with the context; `stdin` as subprocess has it."""

    def pin_to_cores() -> None:
        os.sched_setaffinity(0, cores)

    running = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        preexec_fn=pin_to_cores,
        start_new_session=True,
    )
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(_END_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
        # Some servers leave child processes behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        assert running.stdout is not None
        running.stdout.close()


def _read_first_match(running: subprocess.Popen[str], matches: Callable[[str], str | None]) -> str:
    """The first match in the process's output lines."""
    assert running.stdout is not None
    late = threading.Timer(_START_S, running.kill)
    late.start()
    try:
        for line in running.stdout:
            if found := matches(line):
                return found
    finally:
        late.cancel()
    raise RuntimeError(f"the server ended before it was ready, or was not after {_START_S:g} s")


@contextlib.contextmanager
def run_normserve(
    cores: set[int],
    folder: Path,
    parameters: Mapping[str, np.ndarray],
    backend: str,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    trust: ssl.SSLContext | None = None,
) -> Iterator[list[ServerProcess]]:
    """normserve over TCP and over a Unix domain socket, with a registered layer.

    Args:
        trust: the clients' context, if the options set a certificate.
    """
    uds = folder / "normserve.sock"
    command = [sys.executable, "-m", "normserve", "serve", "--port", "0", "--backend", backend, "--uds", str(uds)]
    unbuffered = {"PYTHONUNBUFFERED": "1", **environment}
    with run_process([*command, "--log-level", "warning", *options], cores, unbuffered) as running:
        served = _register_layer("normserve", running, parameters, trust)
        yield [served, replace(served, name="normserve-uds", address=str(uds))]


@contextlib.contextmanager
def run_deviceless(cores: set[int], parameters: Mapping[str, np.ndarray]) -> Iterator[ServerProcess]:
    """The same server without a device."""
    environment = {"PYTHONUNBUFFERED": "1", "NORMSERVE_PORT": "0", "NORMSERVE_LOG_LEVEL": "warning"}
    with run_process([sys.executable, "-m", "benchmarks.serve.servers.deviceless"], cores, environment) as running:
        yield _register_layer("deviceless", running, parameters)


def _register_layer(
    name: str,
    running: subprocess.Popen[str],
    parameters: Mapping[str, np.ndarray],
    trust: ssl.SSLContext | None = None,
) -> ServerProcess:
    """A normserve server, once it is ready and has the layer."""
    url = _read_first_match(
        running, lambda line: found[1] if (found := re.search(r"POST .* (https?://\S+?)/v1", line)) else None
    )
    with Client(url, timeout_s=_START_S, verify=trust or True) as client:
        client.put_layer(LAYER, "layer_norm", parameters["weight"], parameters["bias"])
    return ServerProcess(name, str(httpx.URL(url).port), f"/v1/layer_norm?layer={LAYER}", running.pid)


@contextlib.contextmanager
def run_plain(
    cores: set[int], folder: Path, parameters: Mapping[str, np.ndarray], device: str
) -> Iterator[list[ServerProcess]]:
    """The plain FastAPI server, with malloc tuned for it."""
    file = folder / "parameters.npz"
    np.savez(file, weight=parameters["weight"], bias=parameters["bias"])
    command = [sys.executable, "-m", "benchmarks.peers.fastapi_server", str(file), device]
    with run_process(command, cores, TUNED_MALLOC) as running:
        yield [ServerProcess("plain-fastapi", _read_first_match(running, str.strip), "/layer_norm", running.pid)]


@contextlib.contextmanager
def run_echo(cores: set[int], program: Path, nbytes: int) -> Iterator[list[ServerProcess]]:
    """The raw echo of messages of one length."""
    with run_process([str(program), str(nbytes)], cores, {}) as running:
        yield [ServerProcess("echo", _read_first_match(running, str.strip), "", running.pid)]
