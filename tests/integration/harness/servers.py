"""A real server process on a real port."""

import contextlib
import functools
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from tests.integration.harness.preloaded import PreloadedProcess
from tests.integration.harness.stage import Stage, stage_on

T = TypeVar("T")

_START_S = 60
# Readings 10 ms and more apart that agree: a server that still ends connections changes within that.
_SAME_READINGS = 8
# Every server here may have others speak HTTP for it: `make test-frontends` runs these tests so.
_FRONTENDS = ["--frontends", os.environ["FRONTENDS"]] if "FRONTENDS" in os.environ else []
HTTP_PROCESSES = int(os.environ.get("FRONTENDS", "1"))

#: Of what is the end of a server only where that is one process.
of_one_process = pytest.mark.skipif(bool(_FRONTENDS), reason="the process with the device is started again")
_LISTENING = re.compile(r'ready on (https?://[^\s"]+)')


def _what(descriptor: Path) -> str:
    """What a descriptor is of; nothing if it is closed by now."""
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""


class ServerProcess:
    """A running `normserve serve` (or a script that stands in for it), its address and what it has logged."""

    def __init__(self, process: PreloadedProcess | subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := _LISTENING.search(line):
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def wait_until_ready(self, patience_s: float = _START_S) -> None:
        assert self._ready.wait(patience_s), self.log
        assert self.url, f"the server ended before it was ready:\n{self.log}"

    @property
    def log(self) -> str:
        """Everything it has written, stdout and stderr together."""
        return "".join(self.lines)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for a raw socket."""
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def client(self) -> httpx.Client:
        """An HTTP client of this server."""
        # To read all certificate authorities takes as long as a dozen requests.
        return httpx.Client(base_url=self.url, verify=self.url.startswith("https:"), timeout=60)

    @functools.cached_property
    def owner(self) -> int:
        """The process that had the device when this was asked first: of several, the one that speaks no HTTP."""
        supervisor = self.process.pid
        end = time.monotonic() + _START_S
        while True:
            children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text(encoding="ascii").split()
            with self.client() as api:
                front_ends = api.get("/v1/info").json().get("front_ends", [])
            if not front_ends:
                return supervisor
            others = set(map(int, children)).difference(each["pid"] for each in front_ends)
            if len(others) == 1:
                return others.pop()
            # A front end that starts is not known to the owner yet.
            assert time.monotonic() < end, f"{others} speak no HTTP"
            time.sleep(0.05)

    def descriptors(self) -> int:
        """How many the process with the device has open, without those of slabs, which front ends map as well."""
        opened = list(Path(f"/proc/{self.owner}/fd").iterdir())
        return len(opened) - sum("memfd:normserve" in _what(each) for each in opened) * bool(_FRONTENDS)

    def resident_bytes(self) -> int:
        """Memory that the process with the device has."""
        status = Path(f"/proc/{self.owner}/status").read_text(encoding="ascii")
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 30) -> int:
        """The exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def stop(self) -> None:
        if self.process.poll() is None:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.wait()
        # A test may have killed it: what it wrote last is still read.
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


StartServer = Callable[..., ServerProcess]


def launch_server(
    options: Sequence[str], environment: Mapping[str, str], script: str | None = None, *, preloaded: bool = True
) -> ServerProcess:
    """Start a server on the CPU and on a free port; `script` stands in for `-m normserve`.

    Unless it is `preloaded` it is the command as users start it, which shares nothing with any other process.
    """
    program = [script] if script else ["-m", "normserve"]
    arguments = [*program, "serve", "--port", "0", "--backend", "torch", *_FRONTENDS, *options]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NORMSERVE_")}
    if preloaded:
        return ServerProcess(PreloadedProcess(arguments, {**clean, **environment}))
    return launch_command([sys.executable, *arguments], {**clean, **environment})


def launch_command(command: Sequence[str], environment: Mapping[str, str]) -> ServerProcess:
    """Start whatever command is a server."""
    return ServerProcess(
        subprocess.Popen(
            command,
            env={"PYTHONUNBUFFERED": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    )


def find_free_port() -> int:
    """Return a TCP port that nothing listens on now, if possible none of those of outgoing connections."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    ports = range(10_000, end) or range(10_000, 65_536)
    while True:
        port = secrets.choice(ports)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def is_up(http: httpx.Client) -> bool:
    """Return whether a server answers that it lives."""
    try:
        return http.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """One server with everything at its default, on the CPU; for tests that leave it as they found it.

    `fleet/test_frontends.py` and slow tests start servers as users do.
    """
    running = launch_server([], {})
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


@contextlib.contextmanager
def _servers() -> Iterator[StartServer]:
    running: list[ServerProcess] = []

    def start(
        *options: str,
        env: Mapping[str, str] | None = None,
        script: str | None = None,
        wait: bool = True,
        preloaded: bool = True,
    ) -> ServerProcess:
        started = launch_server(options, env or {}, script, preloaded=preloaded)
        running.append(started)
        if wait:
            started.wait_until_ready()
        return started

    yield start
    for each in running:
        each.stop()


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Starts servers of the test's own: `start_server("--option", "value", env={...}, wait=True)`.

    `script` names a Python file to run in place of `-m normserve`, with the same arguments.
    """
    with _servers() as start:
        yield start


@pytest.fixture(scope="module")
def launched() -> Iterator[StartServer]:
    """The same for servers that a module's tests share."""
    with _servers() as start:
        yield start


@pytest.fixture(scope="session")
def api(server: ServerProcess) -> Iterator[httpx.Client]:
    """An HTTP client of the session's server."""
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], bool]], None]:
    """Waits for something to become true, a test's patience at most."""

    def wait(condition: Callable[[], bool], patience_s: float = 60) -> None:
        end = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < end, "it never became true"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def settled(until) -> Callable[[Callable[[], T]], T]:
    """What a reading is once it stays the same: what earlier tests left behind may still be on its way home."""

    def value(read: Callable[[], T]) -> T:
        readings: list[T] = []

        def is_the_same() -> bool:
            readings.append(read())
            return len(readings) >= _SAME_READINGS and readings[-_SAME_READINGS:] == [readings[-1]] * _SAME_READINGS

        until(is_the_same)
        return readings[-1]

    return value


@pytest.fixture(scope="module")
def shared_stage(tmp_path_factory, launched, until):
    gate = tmp_path_factory.mktemp("stage") / "gate"
    with stage_on(launched, gate, until) as stage:
        yield stage


@pytest.fixture
def stage(shared_stage):
    """A stage that the module's tests share and leave as they found it: the gate is shut."""
    yield shared_stage
    shared_stage.gate.unlink(missing_ok=True)


@pytest.fixture
def stage_of(start_server, tmp_path, until):
    """Makes a stage of the test's own from the server's options."""
    with contextlib.ExitStack() as stack:

        def make(*options: str) -> Stage:
            start = functools.partial(start_server, *options)
            return stack.enter_context(stage_on(start, tmp_path / "gate", until))

        yield make
