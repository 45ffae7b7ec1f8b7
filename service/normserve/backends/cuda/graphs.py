"""CUDA graphs: the launches of a call, captured once and replayed as one launch."""

import contextlib
import weakref
from collections.abc import Callable

import torch


class CudaGraphCapturer:
    """A capturer on the thread's current stream, which must not be the default stream or already be capturing.

    All graphs share one pool for temporary memory: they must be replayed one after another, on one stream.
    """

    def __init__(self) -> None:
        # None of them is kept for this.
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._failed_graph: torch.cuda.CUDAGraph | None = None

    def capture(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Record the call's launches without running them; the graph has addresses and keeps no tensor alive.

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
    """Return whether torch's allocator has ended a graph's capture: only then has the graph a pool."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True
