"""Streams and events of the current device."""

import threading

import torch


class CudaStreams:
    """Streams of the current device; urgent ones go first where the device has the choice.

    Who waits for something urgent watches for it, who waits for a large copy sleeps and leaves the core to others.
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

    def use(self, stream: torch.cuda.Stream) -> "_CurrentStream":
        return _CurrentStream(stream)


class _CurrentStream:
    """Makes a stream the thread's current one, which it stays: small batches come again and again on the same."""

    _of_thread = threading.local()

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if getattr(self._of_thread, "stream", None) is not self._stream:
            torch.cuda.set_stream(self._stream)
            self._of_thread.stream = self._stream

    def __exit__(self, *exception: object) -> None:
        """The next batch says which stream it wants."""
