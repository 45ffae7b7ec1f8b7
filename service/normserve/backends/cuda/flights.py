"""Batches in progress on the device, in the form in which the engine waits for them."""

from collections.abc import Callable

from normserve.backends.base import InFlight
from normserve.backends.cuda.device_work import Work
from normserve.backends.cuda.in_flight import AnyFlight, LoneFlight, StageSeconds
from normserve.jobs.job import Execution


class OnTheDevice(InFlight):
    """A batch whose results are shared out once it has landed."""

    def __init__(self, flight: AnyFlight, execution: Callable[[StageSeconds], Execution]) -> None:
        self._flight = flight
        self._execution = execution

    def wait(self) -> Execution:
        return self._execution(self._flight.wait())

    def lands_within(self, seconds: float) -> bool:
        return self._flight.lands_within(seconds)


class InItsPlaces(InFlight):
    """A job alone, on tensors where its client has them."""

    def __init__(self, flight: LoneFlight, work: Work) -> None:
        self._flight = flight
        self._work = work

    def lands_within(self, seconds: float) -> bool:
        return self._flight.lands_within(seconds)

    def wait(self) -> Execution:
        work = self._work
        took = self._flight.wait()
        return Execution((work.results,), (work.kernel_bytes,), *took, are_placed=True)
