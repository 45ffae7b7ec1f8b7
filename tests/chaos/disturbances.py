"""What befalls the fleet's processes: each comes, lasts some seconds, and is taken back."""

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx

from tests.integration.harness.wire import packed


class Fleet:
    """The supervisor's process and those that it has started."""

    def __init__(self, supervisor: int, url: str) -> None:
        self.supervisor, self.url = supervisor, url

    def workers(self) -> list[int]:
        """Process numbers of those that serve now."""
        listed = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.supervisor)], capture_output=True, text=True, check=False
        ).stdout
        return [int(line.split()[0]) for line in listed.splitlines() if "normserve.process.worker" in line]

    def processes(self) -> list[int]:
        return [self.supervisor, *self.workers()]


def kill(fleet: Fleet, seconds: float) -> None:
    """One worker ends without a word."""
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(random.choice(fleet.workers()), signal.SIGKILL)
    time.sleep(seconds)


def stop(fleet: Fleet, seconds: float) -> None:
    """One worker does not run for a while; it is found hanging, or goes on."""
    with contextlib.suppress(ProcessLookupError, IndexError):
        worker = random.choice(fleet.workers())
        os.kill(worker, signal.SIGSTOP)
        # Long enough to be found hanging every other time.
        time.sleep(seconds * random.choice((0.3, 3)))
        os.kill(worker, signal.SIGCONT)


def starve(fleet: Fleet, seconds: float) -> None:
    """Others take the processors."""
    burn = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    others = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(2 * (os.cpu_count() or 1))]
    for each in others:
        each.wait()


@contextlib.contextmanager
def _limited(process: int, kind: int, soft: int) -> Iterator[None]:
    before = resource.prlimit(process, kind)
    resource.prlimit(process, kind, (soft, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process, kind, before)


def limit_memory(fleet: Fleet, seconds: float) -> None:
    """Workers get no more memory than they have."""
    with contextlib.ExitStack() as stack:
        for worker in fleet.workers():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):
                stack.enter_context(_limited(worker, resource.RLIMIT_AS, _virtual_bytes(worker)))
        time.sleep(seconds)


def _virtual_bytes(process: int) -> int:
    with open(f"/proc/{process}/statm", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().split()[0]) * resource.getpagesize()


def fill_disk(fleet: Fleet, seconds: float) -> None:
    """No file can be written, while somebody registers layers."""
    import torch

    body = packed(weight=torch.ones(1024))
    with contextlib.ExitStack() as stack:
        for worker in fleet.workers():
            with contextlib.suppress(ProcessLookupError):
                stack.enter_context(_limited(worker, resource.RLIMIT_FSIZE, 0))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.put(f"{fleet.url}/v1/layers/full?op=rms_norm", content=body, timeout=30)
                assert answer.status_code in (429, 503, 507), answer.text
                assert answer.headers["content-type"] == "application/problem+json"
            time.sleep(0.2)


def exhaust_descriptors(fleet: Fleet, seconds: float) -> None:
    """No connection can be accepted for want of a descriptor."""
    with contextlib.ExitStack() as stack:
        for process in fleet.processes():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                opened = len(os.listdir(f"/proc/{process}/fd"))  # noqa: PTH208
                stack.enter_context(_limited(process, resource.RLIMIT_NOFILE, opened + 1))
        time.sleep(seconds)


def change_layers(fleet: Fleet, seconds: float) -> None:
    """Layers come and go, and all processes agree in the end."""
    import torch

    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        number += 1
        with contextlib.suppress(httpx.TransportError):
            body = packed(weight=torch.full((64,), float(number)))
            httpx.put(f"{fleet.url}/v1/layers/changing-{number % 5}?op=rms_norm", content=body, timeout=30)
            if number % 3 == 0:
                httpx.delete(f"{fleet.url}/v1/layers/changing-{number % 5}", timeout=30)
        time.sleep(0.05)


DISTURBANCES: dict[str, Callable[[Fleet, float], None]] = {
    each.__name__: each
    for each in (kill, stop, starve, limit_memory, fill_disk, exhaust_descriptors, change_layers)
}
