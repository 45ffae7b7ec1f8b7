"""A backend that does what a test has it do, and what its executor replies."""

import threading
from collections import deque

from normserve.backends.interface import PendingLaunch
from normserve.errors import DeviceOutOfMemoryError
from normserve.jobs.device_description import DeviceDescription
from normserve.jobs.job import BatchResult

EXECUTION = BatchResult(({},), (0,), 0.0, 0.0, 0.0)


class FakeBackend:
    """Notes the threads that call it; raises what it was told to."""

    name = "fake"

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.error: Exception | None = None
        self.results: deque[object] = deque()
        self.may_load = threading.Event()
        self.may_load.set()
        self.is_ready = True

    def start(self):
        return self._noted(DeviceDescription("a device", "cpu", 1e9, {}))

    def load_parameters(self, op, weight, bias):
        assert self.may_load.wait(20)
        return self._noted((weight, bias))

    def can_launch_without_waiting(self, batch):
        return self.is_ready

    def run(self, batch):
        return self._noted(self.results.popleft() if self.results else EXECUTION)

    def compile_and_load_kernels(self, job):
        return self._noted(None)

    def translate_error(self, error):
        return DeviceOutOfMemoryError("dry") if isinstance(error, MemoryError) else None

    def read_memory_bytes(self):
        return {}

    def _noted(self, value):
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        return value


class Landing(PendingLaunch):
    """Is done when it is told to be, or raises what it is told to."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.error: Exception | None = None
        self.thread = 0
        self.fault: Exception | None = None

    def poll(self, seconds):
        if self.fault is not None:
            raise self.fault
        return self.may_end.is_set()

    def wait(self):
        assert self.may_end.wait(20)
        self.thread = threading.get_ident()
        if self.error is not None:
            raise self.error
        return EXECUTION


class Replies:
    """Collects replies and lets the test wait for each."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self.all = []

    def __call__(self, outcome):
        self.all.append(outcome)
        self._arrived.release()

    def next(self):
        assert self._arrived.acquire(timeout=20)
        return self.all[-1]
