"""As much of torch as the arena in device memory uses, on the host: streams that are busy when told so."""

from types import SimpleNamespace
from typing import Any

import torch

from tests.service.memory.fake_driver import bytes_at


class FakeStream:
    def __init__(self) -> None:
        self.is_busy = False
        self.is_captured = False
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        self.is_busy = False

    def query(self) -> bool:
        assert not self.is_captured, "the capture would be lost"
        return not self.is_busy


class FakeEvent:
    """Comes once its stream is not busy."""

    def __init__(self, blocking: bool = False) -> None:
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.stream is None or self.stream.query()

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.waits += 1
            self.stream.is_busy = False


class FakeTorch:
    """The module, with one device whose memory is the host's."""

    def __init__(self) -> None:
        self.stream = FakeStream()
        self.synchronised = 0
        self.streams: dict[int, FakeStream] = {}
        self.cuda = SimpleNamespace(
            Event=FakeEvent,
            Stream=lambda stream_id, device_index, device_type: self.streams[stream_id],
            synchronize=self._synchronize,
            is_initialized=lambda: True,
        )
        self._C = SimpleNamespace(
            _cuda_getCurrentStream=self._current, _cuda_isCurrentStreamCapturing=lambda: self.stream.is_captured
        )

    def _current(self, ordinal: int) -> tuple[int, int, int]:
        self.streams[id(self.stream)] = self.stream
        return id(self.stream), ordinal, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def as_tensor(self, source: Any, *, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cuda:0")
        told = source.__cuda_array_interface__
        dtype = {"<f4": torch.float32, "<f2": torch.float16, "<i2": torch.int16, "|u1": torch.uint8}[
            told["typestr"]
        ]
        count = 1
        for size in told["shape"]:
            count *= size
        there = bytes_at(told["data"][0], count * dtype.itemsize)
        # As torch's own, the tensor keeps what told it.
        there.source = source
        return torch.frombuffer(there, dtype=dtype).view(told["shape"])

    def _synchronize(self, ordinal: int) -> None:
        self.synchronised += 1
