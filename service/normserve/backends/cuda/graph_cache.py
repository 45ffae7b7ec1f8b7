"""Repeated calls, captured once as a CUDA graph and then replayed as one launch.

`RepeatedCall` and `GraphCache` decide which calls are captured and how long a graph is kept; a `GraphCapturer`,
for CUDA `CudaGraphCapturer`, makes the graphs.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

log = logging.getLogger(__name__)

# On an H100 a capture and the first replay take 0.08 ms, and each replay, which needs no Python code, saves 0.1 ms
# of a request.  A capture of a large job's chunks takes about as long as the job itself.
_CALLS_BEFORE_CAPTURE = 20

# Of all requests together.  Each takes 0.1 MiB of the device's memory (measured on an H100).
_MOST_GRAPHS = 1024

Call = Callable[[], object]


class CapturedGraph(Protocol):
    """A recording of the work that a call puts on a stream, such as a CUDA graph."""

    def replay(self) -> None:
        """Put the captured work on the thread's current stream."""


class GraphCapturer(Protocol):
    """An object that records calls as graphs."""

    def capture(self, call: Call) -> CapturedGraph:
        """Record the work that a call puts on the thread's current stream, without running it.

        After any error, the stream takes work as before.
        """


class RepeatedCall:
    """A call that is made many times on the same tensors, and is replaced by a captured graph after some calls."""

    def __init__(self, call: Call, what: object, replays: "GraphCache") -> None:
        """Store the call.

        Args:
            what: its name in the log.
            replays: the cache for its graph.
        """
        self._call = call
        self._what = what
        self._replays = replays
        self._times = 0
        self._graph: CapturedGraph | None = None

    def run(self) -> None:
        """Replay the graph if there is one.  Make the call if there is no graph or the replay fails."""
        if self._graph is not None:
            try:
                self._graph.replay()
                return
            except Exception as error:
                # A device that has failed fails the call as well.
                self._disable_graph(error)
        self._call()
        self._times += 1

    @property
    def graph(self) -> CapturedGraph | None:
        """The graph that is replayed; None before the capture."""
        return self._graph

    @property
    def is_capture_due(self) -> bool:
        """Whether the number of calls has reached that at which the call is captured."""
        return self._times == _CALLS_BEFORE_CAPTURE

    def capture(self) -> None:
        """Capture the call as a graph, which `run` then replays.  An error is logged, and the capture is not tried
        again.

        Called on the call's stream, but outside its measured time.
        """
        self._times += 1
        try:
            self._graph = self._replays.capture(self, self._call)
        except Exception as error:
            self._disable_graph(error)

    def release_graph(self) -> None:
        """Release the graph; the call is captured again after as many calls."""
        if self._graph is not None:
            self._graph, self._times = None, 0

    def _disable_graph(self, error: Exception) -> None:
        self._graph = None
        # The text alone: an error's frames hold the call's tensors.
        log.warning("%s is called and not replayed: %s: %s", self._what, type(error).__name__, str(error))


class GraphCache:
    """A limited number of captured graphs on a device.  A new graph beyond the limit releases the oldest one.

    Not thread-safe.
    """

    def __init__(self, graphs: GraphCapturer) -> None:
        self._graphs = graphs
        # Those that have a graph, the oldest first; calls that go take theirs along.
        self._captured: list[weakref.ref[RepeatedCall]] = []

    def capture(self, repeated: RepeatedCall, call: Call) -> CapturedGraph:
        """Capture a call as the graph of `repeated`; if there are too many graphs, release the oldest one."""
        graph = self._graphs.capture(call)
        self._captured = [each for each in self._captured if each() is not None]
        if len(self._captured) >= _MOST_GRAPHS:
            oldest = self._captured.pop(0)()
            if oldest is not None:
                oldest.release_graph()
        self._captured.append(weakref.ref(repeated))
        return graph


class CudaGraphCapturer:
    """A capturer of CUDA graphs on the thread's current stream, which must be neither the default stream
    nor capturing.

    All graphs share one pool for temporary memory: they must be replayed one after another, on one
    stream.
    """

    def __init__(self) -> None:
        # None of them is kept for this.
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._failed_graph: torch.cuda.CUDAGraph | None = None

    def capture(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Record the call's launches without running them; the caller must keep their tensors alive, as the
        graph does not.

        Raises:
            Exception: of the call, or of CUDA; the stream takes work as before.
        """
        if self._failed_graph is not None:
            raise RuntimeError("an earlier capture could not be ended")
        # Kept alive during the capture: a pool lives as long as one of its graphs, and then its handle is invalid.
        other = next(iter(self._alive), None)
        pool = torch.cuda.graph_pool_handle() if other is None else other.pool()
        graph = torch.cuda.CUDAGraph()
        try:
            # Not by `torch.cuda.graph`, which waits for the device and empties torch's cache first.  The work of
            # other threads on the device is not captured and does no harm.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                # Else the stream would go on recording.
                with contextlib.suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            if not _has_ended_capture(graph):
                # torch's allocator may go on asking it which memory is its own: it stays, and is the last.
                self._failed_graph = graph
            raise
        self._alive.add(graph)
        return graph


def _has_ended_capture(graph: torch.cuda.CUDAGraph) -> bool:
    """Return whether torch's allocator has ended the capture of a graph.

    Before that, the graph has no memory pool.
    """
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True
