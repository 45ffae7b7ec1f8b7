"""Three stages on three streams: while one batch is computed, the next comes in and the one before goes out.

What a stage does, and what streams and events are, is the caller's; the order of things is kept here.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


class Event(Protocol):
    """A moment on a stream, as of CUDA."""

    def record(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class Stream(Protocol):
    """What is put on it happens in turn, as of CUDA."""

    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...


class Streams(Protocol):
    """Where streams and events come from."""

    def stream(self) -> Stream: ...
    def event(self) -> Event: ...
    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Work is put on that stream inside."""


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """How long each stage took on the device, without its wait for the one before."""

    copy_in: float
    compute: float
    copy_out: float


class Flight:
    """A batch that is on its way through the stages.

    Attributes:
        value: what the last stage gave; its memory is written to until `wait` returns.
    """

    def __init__(self, value: Any, spans: list[tuple[Event, Event]], held: list[Any]) -> None:
        self.value = value
        self._spans = spans
        self._held = held

    def wait(self) -> StageSeconds:
        """Block until the last stage is over, and let go of what the stages worked on."""
        self._spans[-1][1].synchronize()
        self._held.clear()
        return StageSeconds(*(began.elapsed_time(ended) / 1000 for began, ended in self._spans))


class Pipeline:
    """The streams of one lane."""

    def __init__(self, streams: Streams, *, apart: bool = True) -> None:
        """Args: apart: each stage has a stream of its own; else all share one, which starts sooner."""
        self._source = streams
        self._streams = [streams.stream() for _ in range(3)] if apart else [streams.stream()] * 3

    def start(self, *stages: Callable[[Any], Any], first: Any = None) -> Flight:
        """Put copy-in, compute and copy-out on their streams, each after the one before it; blocks for none.

        Args:
            stages: each is called with what the one before it gave, `first` the first.  What they gave stays alive
                until the flight is over: a device's allocator knows one stream for each block of memory, so a block
                may be given back only when no stream uses it.
        """
        held = [first]
        spans: list[tuple[Event, Event]] = []
        current: Stream | None = None
        try:
            with contextlib.ExitStack() as in_use:
                for stream, stage in zip(self._streams, stages, strict=True):
                    if stream is current:
                        began = spans[-1][1]
                    else:
                        in_use.close()
                        in_use.enter_context(self._source.use(stream))
                        current = stream
                        if spans:
                            stream.wait_event(spans[-1][1])
                        began = self._mark(stream)
                    held.append(stage(held[-1]))
                    spans.append((began, self._mark(stream)))
        except BaseException:
            self._settle()
            raise
        return Flight(held[-1], spans, held)

    def _mark(self, stream: Stream) -> Event:
        event = self._source.event()
        event.record(stream)
        return event

    def _settle(self) -> None:
        """What was put on the streams may still write to memory that the caller is about to give back."""
        for stream in self._streams:
            # The error that is on its way says more than the same device's next.
            with contextlib.suppress(Exception):
                stream.synchronize()
