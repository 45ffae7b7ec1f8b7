"""What has been put on streams and is not over yet, and how long its stages take."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Event(Protocol):
    """A moment on a stream, as of CUDA.

    Attributes:
        cuda_event: the driver's handle, once it has been recorded.
    """

    @property
    def cuda_event(self) -> int: ...

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class StageSeconds(NamedTuple):
    """How long each stage took on the device, without its wait for the one before."""

    copy_in: float
    compute: float
    copy_out: float


class AnyFlight(ABC):
    """A batch on the device, which has landed once its last event is over."""

    __slots__ = ("_ended", "_has_landed", "_held", "_spare")

    def __init__(self, held: object, ended: Event, spare: list[Event]) -> None:
        """Args:
        held: what the stages work on.
        ended: the end of all of them.
        spare: takes the events once they are over.
        """
        self._held = held
        self._ended = ended
        self._spare = spare
        self._has_landed = False

    def lands_within(self, seconds: float) -> bool:
        """Watch for its end, for so long at most; whether it is over."""
        self._has_landed = _passes_within(self._ended, seconds)
        return self._has_landed

    def wait(self) -> StageSeconds:
        """Block until it is over, and release what it worked on; called once."""
        if not self._has_landed:
            self._ended.synchronize()
        self._held = None
        return self._took()

    @abstractmethod
    def _took(self) -> StageSeconds:
        """Read the events and give them back."""


class Flight(AnyFlight):
    """A batch that is on its way through the stages.

    Attributes:
        value: what the last stage gave; its memory is written to until `wait` returns.
    """

    __slots__ = ("_marks", "_spans", "value")

    def __init__(
        self,
        value: Any,
        spans: list[tuple[Event, Event]],
        held: list[Any],
        marks: list[Event],
        spare: list[Event],
    ) -> None:
        super().__init__(held, marks[-1], spare)
        self.value = value
        self._spans = spans
        self._marks = marks

    def _took(self) -> StageSeconds:
        took = [began.elapsed_time(ended) / 1000 for began, ended in self._spans]
        self._spare.extend(self._marks)
        return StageSeconds(*took)


class DividedFlight(AnyFlight):
    """A batch that is on its way through the stages in parts, whose stages overlap."""

    __slots__ = ("_began", "_came", "_computed")

    def __init__(
        self, began: Event, came: list[Event], computed: list[Event], ended: Event, held: object, spare: list[Event]
    ) -> None:
        """Args: came, computed: the end of copy-in and of compute of each part."""
        super().__init__(held, ended, spare)
        self._began = began
        self._came, self._computed = came, computed

    def _took(self) -> StageSeconds:
        took = took_of(self._began, [*zip(self._came, self._computed, strict=True)], self._ended)
        self._spare += (self._began, *self._came, *self._computed, self._ended)
        return took


class LoneFlight(AnyFlight):
    """A batch between two events, on one stream.

    Attributes:
        value: what the stage gave; its memory is written to until `wait` returns.
    """

    __slots__ = ("_began", "_marks", "value")

    def __init__(
        self, value: Any, held: object, began: Event, ended: Event, spare: list[Event], marks: "Marks" = ()
    ) -> None:
        """Args:
        held: what the stage works on.
        marks: of its parts, which are copied; none of what is computed where it lies.
        """
        super().__init__(held, ended, spare)
        self.value = value
        self._began = began
        self._marks = marks

    def _took(self) -> StageSeconds:
        took = took_of(self._began, self._marks, self._ended)
        self._spare += (self._began, self._ended)
        return took


Marks = Sequence[tuple[Event, Event]]
"""Of each part the end of its copy-in and of its compute stage."""


def took_of(began: Event, marks: Marks, ended: Event) -> StageSeconds:
    """Divide the time of parts that overlap among the stages, so that their sum is the whole.

    Copy-in is the time in which the next part is awaited and none is computed; copy-out is the time after the last
    part is computed.
    """
    whole_s = began.elapsed_time(ended) / 1000
    if not marks:
        return StageSeconds(0.0, whole_s, 0.0)
    copy_in_s = compute_s = before = 0.0
    for came, computed in marks:
        arrived, done = began.elapsed_time(came) / 1000, began.elapsed_time(computed) / 1000
        copy_in_s += max(0.0, arrived - before)
        compute_s += done - max(before, arrived)
        before = done
    return StageSeconds(copy_in_s, compute_s, whole_s - before)


def _passes_within(event: Event, seconds: float) -> bool:
    """Watch for an event, for so long at most; whether it is over."""
    if event.query():
        return True
    give_up = time.perf_counter() + seconds
    while not event.query():
        if time.perf_counter() >= give_up:
            return False
    return True
