"""The memory of a device that a client shares with the server, divided into blocks by the client alone.

A block returns with the last view of it, and not before the device is done with what was put on the stream that was
current then: until that, kernels may still read or write there.
"""

import importlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from normserve.client.local.arena import Arena, Part
from normserve.codec.local_frames import Place
from normserve.memory.device_segments import Device, DeviceMemoryError, DeviceSegment
from normserve.memory.host_tensors import DType

log = logging.getLogger(__name__)

# Small kernels are over sooner than a thread is woken.
_SPIN_S = 50e-6

# As other libraries on CUDA are told of elements; they have no bfloat16.
_TYPES = {DType.FLOAT32: "<f4", DType.FLOAT16: "<f2", DType.BFLOAT16: "<i2"}


class DeviceBlock:
    """Bytes of the arena; what is made of them keeps the block.

    Attributes:
        place: where they lie, as the protocol says it.
    """

    __slots__ = ("__cuda_array_interface__", "_home", "address", "place")

    __cuda_array_interface__: dict[str, object]

    def __init__(self, home: "DeviceArena", place: Place, address: int) -> None:
        self.place = place
        self.address = address
        self._home = home

    def __del__(self) -> None:
        self._home.note_return(self.place)


class _Mapping(DeviceSegment):
    """A segment of the client's: it goes once the device uses it no more."""

    def __del__(self) -> None:
        try:
            importlib.import_module("torch").cuda.synchronize(self.device.ordinal)
        except Exception:
            # The process ends, and everything with it; or the device has failed.
            return
        super().__del__()


class DeviceArena(Arena):
    """Segments of a device's memory, and the blocks in them.  Threads share one.

    Attributes:
        ordinal: the device's, as torch counts.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._torch: Any = importlib.import_module("torch")
        self._device = device
        self.ordinal = device.ordinal
        self._name = f"cuda:{device.ordinal}"
        # Blocks that nobody looks at, each with an event that comes once the device does not, either.
        self._dying: deque[tuple[Place, Any]] = deque()
        self._spare: list[Any] = []

    def add_device_segment(self, number: int, descriptor: int, nbytes: int) -> None:
        """Take in what the server has made.

        Raises:
            ValueError: the descriptor is of no such memory.
        """
        try:
            segment = self._device.open(descriptor, nbytes, _Mapping)
        except DeviceMemoryError as error:
            raise ValueError(f"the device's memory cannot be mapped: {error}") from None
        self._add(Part(number, segment, segment.address, nbytes))

    def take_block(self, nbytes: int) -> DeviceBlock | None:
        """A block of at least so many bytes; None where there is no room."""
        found = self._find(nbytes)
        if found is None:
            return None
        part, place = found
        return DeviceBlock(self, place, part.address + place.offset)

    def locate_tensor(self, tensor: Any) -> tuple[int, int] | None:
        """The segment and the offset at which a contiguous tensor lies; None of any other, and elsewhere."""
        return self._located(tensor.data_ptr()) if tensor.is_contiguous() else None

    def tensor(self, block: DeviceBlock, dtype: DType, shape: tuple[int, ...]) -> Any:
        """A tensor in a block, which it keeps."""
        torch = self._torch
        if not math.prod(shape):
            return torch.empty(shape, dtype=getattr(torch, dtype.label), device=self._name)
        block.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": _TYPES[dtype],
            "data": (block.address, False),
            "version": 2,
        }
        made = torch.as_tensor(block)
        return made.view(torch.bfloat16) if dtype is DType.BFLOAT16 else made

    def fill(self, tensor: Any, source: Any) -> None:
        """Copy to a tensor of the arena what another tensor, or memory of the host, has."""
        if isinstance(source, memoryview):
            if not len(source):
                return
            source = self._torch.frombuffer(source, dtype=tensor.dtype).view(tensor.shape)
        tensor.copy_(source)

    def busy_stream(self) -> "Busy | None":
        """What must be waited for before the server may read what the current stream writes, if anything.

        Raises:
            RuntimeError: the stream is being captured: the server is not a part of any graph.
        """
        cuda = self._torch.cuda
        if cuda.is_current_stream_capturing():
            raise RuntimeError("a call of the service cannot be captured in a CUDA graph")
        stream = cuda.current_stream(self.ordinal)
        return None if stream.query() else Busy(cuda, stream)

    def note_return(self, place: Place) -> None:
        try:
            event = self._event()
            if event is not None and self._on_empty is not None:
                event.synchronize()
                event = None
        except Exception:
            # The process ends, or the device has failed: who knows what uses it still.
            return
        if event is None:
            super().note_return(place)
        else:
            self._dying.append((place, event))

    def once_empty(self, then: Callable[[], None]) -> None:
        with self._lock:
            for _, event in self._dying:
                event.synchronize()
        super().once_empty(then)

    def unmap(self) -> None:
        """Let go of all segments, which nobody has a block of."""
        self._parts.clear()

    def _event(self) -> Any:
        """What comes once the current stream is done with what it has; None if it is."""
        cuda = self._torch.cuda
        if cuda.is_current_stream_capturing():
            raise RuntimeError("whoever replays the graph uses what lies there")
        stream = cuda.current_stream(self.ordinal)
        if stream.query():
            return None
        event = self._spare.pop() if self._spare else cuda.Event()
        event.record(stream)
        return event

    def _collect(self) -> None:
        for _ in range(len(self._dying)):
            place, event = self._dying.popleft()
            if event.query():
                self._spare.append(event)
                self._returned.append(place)
            else:
                self._dying.append((place, event))
        super()._collect()


class Busy:
    """A stream has work that must be over first."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda = cuda
        self._stream = stream

    def wait(self) -> None:
        """Until what the stream has now is over."""
        give_up = time.perf_counter() + _SPIN_S
        while not self._stream.query():
            if time.perf_counter() > give_up:
                event = self._cuda.Event(blocking=True)
                event.record(self._stream)
                event.synchronize()
                return


def arena_on(offer: Any) -> DeviceArena | None:
    """An arena in the memory of the device that a server offers; None where there is no use for it."""
    if not isinstance(offer, dict) or not isinstance(offer.get("uuid"), str):
        return None
    try:
        return DeviceArena(Device.find(offer["uuid"]))
    except DeviceMemoryError as error:
        log.warning("tensors on the device are sent by way of the host's memory: %s", error)
        return None
