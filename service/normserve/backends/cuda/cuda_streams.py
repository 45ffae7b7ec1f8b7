"""Streams and events of the current device."""

import threading

import torch


class CudaStreams:
    """A factory of streams and events of the current device; the device prefers the work of urgent streams.

    A host thread busy-waits for events of urgent streams; for those of others it sleeps, which leaves
    the core to other threads.
    """

    def __init__(self, *, urgent: bool) -> None:
        self._priority = -1 if urgent else 0
        self._sleeps = not urgent

    def make_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(priority=self._priority)

    def make_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True, blocking=self._sleeps)

    def make_graph_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True, external=True)

    def use(self, stream: torch.cuda.Stream) -> "_CurrentStreamSetter":
        return _CurrentStreamSetter(stream)


class _CurrentStreamSetter:
    """A context manager that makes a stream the thread's current one.  At its end the stream stays current; the
    previous one is not restored.

    The next batch sets its own stream, which is often the same one.
    """

    _of_thread = threading.local()

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if getattr(self._of_thread, "stream", None) is not self._stream:
            torch.cuda.set_stream(self._stream)
            self._of_thread.stream = self._stream

    def __exit__(self, *exception: object) -> None:
        """Do nothing: the next batch sets its own stream."""
