"""Repeated calls: captured once as a graph, then replayed.

This module decides which calls are captured and how long a graph is kept.  What a graph is and how it is captured
is up to the caller.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

log = logging.getLogger(__name__)

# On an H200 a capture and the first replay take 0.6 ms, and each replay saves 15 microseconds: forty pay for them.
# After as few calls, a client that sends something else after each capture would have a quarter of the time go to
# captures.  Two hundred take 11 ms with the rest of their turns, which leaves captures a twentieth.
_CALLS_BEFORE_CAPTURE = 200

# Of all slabs and requests together.  Each takes 0.1 MiB of the device's memory (measured on an H100).
_MOST_GRAPHS = 1024

# Those whose calls a slab counts, for each kind of call.
_MOST_LAYERS = 256

Call = Callable[..., Any]


class Graph(Protocol):
    """What a call put on a stream, as of CUDA."""

    def replay(self) -> None:
        """Put it on the thread's current stream."""


class Graphs(Protocol):
    """Where graphs come from."""

    def capture(self, call: Callable[[], object]) -> Graph:
        """What a call puts on the thread's current stream, recorded and not run.

        Whatever fails, the stream takes work as before.
        """


class Repeated:
    """One call with the same tensors each time."""

    def __init__(self, call: Call, what: object, replays: "Replays", calls: int | None = None) -> None:
        """Make it.

        Args:
            call: wants a layer's parameters by name; they are given each time and not held.
            what: its name in the log.
            replays: of whose graphs it has one.
            calls: after how many it is worth a graph; many by default.
        """
        self._calls = _CALLS_BEFORE_CAPTURE if calls is None else calls
        self._call = call
        self._what = what
        self._replays = replays
        self._times = 0
        self._graph: Graph | None = None

    def make(self, parameters: Mapping[str, object]) -> None:
        """Make the call, or replay it."""
        if self._graph is not None:
            try:
                self._graph.replay()
                return
            except Exception as error:
                # A device that has failed fails the call as well.
                self._stay_as_it_is(error)
        self._call(**parameters)
        self._times += 1

    @property
    def graph(self) -> Graph | None:
        """What is replayed, once it has been captured."""
        return self._graph

    @property
    def is_due(self) -> bool:
        """Whether it was made so often that it is worth a graph now."""
        return self._times == self._calls

    def capture(self, parameters: Mapping[str, object]) -> None:
        """Replay it from now on, or never; raises nothing.  Called where it is made, but not in its time."""
        self._times += 1
        try:
            self._graph = self._replays.capture(self, functools.partial(self._call, **parameters))
        except Exception as error:
            self._stay_as_it_is(error)

    def forget(self) -> None:
        """Release the graph; the call gets another one in the same way."""
        if self._graph is not None:
            self._graph, self._times = None, 0

    def _stay_as_it_is(self, error: Exception) -> None:
        self._graph = None
        # The text alone: an error's frames hold the parameters.
        log.warning("%s is called and not replayed: %s: %s", self._what, type(error).__name__, str(error))


class Replays:
    """The graphs of a device's calls, of which only so many live.  One thread at a time."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        # Those that have a graph, the oldest first; slabs and layers that go take theirs along.
        self._captured: list[weakref.ref[Repeated]] = []

    def capture(self, repeated: Repeated, call: Callable[[], object]) -> Graph:
        """A graph of the call; the oldest goes for it if there are too many."""
        graph = self._graphs.capture(call)
        self._captured = [each for each in self._captured if each() is not None]
        if len(self._captured) >= _MOST_GRAPHS:
            oldest = self._captured.pop(0)()
            if oldest is not None:
                oldest.forget()
        self._captured.append(weakref.ref(repeated))
        return graph


class RepeatedByLayer:
    """One call with the parameters of one registered layer or another, or with none.

    Attributes:
        call: makes it, whatever is known of it.
    """

    def __init__(self, call: Call, what: object, replays: Replays) -> None:
        """Args: as of `Repeated`."""
        self.call = call
        self._new = functools.partial(Repeated, call, what, replays)
        self._without = self._new()
        # A layer that is deleted frees its parameters, and nothing reads them afterwards.
        self._of_layers: weakref.WeakKeyDictionary[object, Repeated] = weakref.WeakKeyDictionary()

    def of(self, resident: object | None) -> Repeated:
        """That with a layer's parameters, as the backend keeps them."""
        if resident is None:
            return self._without
        found = self._of_layers.get(resident)
        if found is None:
            if len(self._of_layers) >= _MOST_LAYERS:
                self._of_layers.clear()
            found = self._of_layers[resident] = self._new()
        return found
