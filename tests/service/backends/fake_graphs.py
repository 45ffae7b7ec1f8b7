"""Graphs without a device."""

import weakref
from collections.abc import Callable


class FakeGraphs:
    """A graph is the call itself, made at every replay.

    Attributes:
        captured: how many calls were.
        replayed: how many replays there were.
        alive: the graphs that somebody still has.
        broken: makes what to raise instead of capturing.
        broken_replay: makes what to raise instead of replaying.
    """

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0
        self.alive: weakref.WeakSet[FakeGraph] = weakref.WeakSet()
        self.broken: Callable[[], Exception] | None = None
        self.broken_replay: Callable[[], Exception] | None = None

    def capture(self, call):
        if self.broken is not None:
            raise self.broken()
        self.captured += 1
        graph = FakeGraph(self, call)
        self.alive.add(graph)
        return graph


class FakeGraph:
    def __init__(self, graphs, call):
        self.graphs, self.call = graphs, call

    def raw_cuda_graph_exec(self):
        return id(self)

    def replay(self):
        if self.graphs.broken_replay is not None:
            raise self.graphs.broken_replay()
        self.graphs.replayed += 1
        self.call()
