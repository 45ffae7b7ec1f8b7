"""The one thread that owns the device."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from normserve.backends.base import Backend
from normserve.device import DeviceInfo
from normserve.errors import NormserveError
from normserve.jobs import Batch, Op
from normserve.tensors import HostTensor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a piece of work: a value or an error, never both.

    Attributes:
        started: when the device took it up, by `time.perf_counter`.
    """

    started: float
    value: object = None
    error: NormserveError | None = None


Reply = Callable[[Outcome], None]


class Executor:
    """Runs work on its own thread, one piece after another; replies are called on that thread."""

    def __init__(self, make_backend: Callable[[], Backend]) -> None:
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self._inbox: queue.SimpleQueue[tuple[Callable[[], object], Reply] | None] = queue.SimpleQueue()
        # A device that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._work, name="device-owner", daemon=True)

    def start(self, reply: Reply) -> None:
        """Start the thread and the device; the reply's value is a `DeviceInfo`."""
        self._thread.start()
        self._inbox.put((self._start_backend, reply))

    def run(self, batch: Batch, reply: Reply) -> None:
        """Run a batch; the reply's value is an `Execution`."""
        self._inbox.put((lambda: self.backend.run(batch), reply))

    def load(self, op: Op, weight: HostTensor, bias: HostTensor | None, reply: Reply) -> None:
        """Keep parameters on the device; the reply's value is the backend's handle for them."""
        self._inbox.put((lambda: self.backend.load(op, weight, bias), reply))

    def stop(self, timeout_s: float) -> None:
        """End the thread once what was handed in is done, or leave it behind after `timeout_s`."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    @property
    def backend(self) -> Backend:
        """The device's driver, once it has started."""
        if self._backend is None:
            raise RuntimeError("the backend has not started")
        return self._backend

    def _start_backend(self) -> DeviceInfo:
        self._backend = self._make_backend()
        return self._backend.start()

    def _work(self) -> None:
        while (item := self._inbox.get()) is not None:
            work, reply = item
            reply(self._attempt(work))
            # Whoever waits for the next piece must not keep this one's memory.
            del item, work, reply

    def _attempt(self, work: Callable[[], object]) -> Outcome:
        started = time.perf_counter()
        try:
            return Outcome(started, value=work())
        except Exception as error:
            return Outcome(started, error=self._translate(error))

    def _translate(self, error: Exception) -> NormserveError:
        if isinstance(error, NormserveError):
            return error
        meaning = None if self._backend is None else self._backend.translate(error)
        if meaning is None:
            log.exception("the executor met an error that it does not know", exc_info=error)
            return NormserveError("the server met an error of its own; its log says more")
        log.error("%s: %s", meaning.code, error)
        return meaning
