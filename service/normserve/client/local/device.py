"""The memory of a device that a client shares with the server, divided into blocks by the client alone.

A block returns with the last view of it, and not before the stream that was current then has been found idle: until
that, kernels may still read or write there.
"""

import importlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from normserve.client.local.allocator import ArenaAllocator, MappedSegment
from normserve.codec.local_frames import SegmentRange
from normserve.memory.device_segments import DeviceMemoryError, DeviceSegment, ShareableDevice
from normserve.memory.host_tensors import DType

log = logging.getLogger(__name__)

# Small kernels are over sooner than a thread is woken.
_SPIN_S = 50e-6

# As other libraries on CUDA are told of elements; they have no bfloat16 and no float8.
_TYPES = {DType.FLOAT32: "<f4", DType.FLOAT16: "<f2", DType.BFLOAT16: "<i2", DType.FLOAT8_E4M3FN: "|u1"}
_NOT_OF_OTHERS = (DType.BFLOAT16, DType.FLOAT8_E4M3FN)


# Of a stream: its number, the index of its device and the type of that, as torch has them.
_StreamKey = tuple[int, int, int]


class DeviceBlock:
    """Bytes of the arena; what is made of them keeps the block.

    Attributes:
        segment_range: where they lie, as the protocol says it.
    """

    __slots__ = ("__cuda_array_interface__", "_arena", "address", "segment_range")

    __cuda_array_interface__: dict[str, object]

    def __init__(self, home: "DeviceArena", place: SegmentRange, address: int) -> None:
        self.segment_range = place
        self.address = address
        self._arena = home

    def __del__(self) -> None:
        self._arena.queue_return(self.segment_range)


class _UnownedAddress:
    """An address that a tensor is made at."""

    __slots__ = ("__cuda_array_interface__", "address")

    __cuda_array_interface__: dict[str, object]

    def __init__(self, address: int) -> None:
        self.address = address


class _ClientDeviceSegment(DeviceSegment):
    """A segment of the client's: it goes once the device uses it no more."""

    def __del__(self) -> None:
        try:
            cuda = importlib.import_module("torch").cuda
            # Whenever garbage is collected, also while torch initialises CUDA and would wait for itself here.
            if cuda.is_initialized():
                cuda.synchronize(self.device.ordinal)
        except Exception:
            # The process ends, and everything with it; or the device has failed.
            return
        super().__del__()


class DeviceArena(ArenaAllocator[DeviceBlock]):
    """Segments of a device's memory, and the blocks in them.  Threads share one.

    Attributes:
        ordinal: the device's, as torch counts.
    """

    def __init__(self, device: ShareableDevice) -> None:
        super().__init__()
        self._torch: Any = importlib.import_module("torch")
        self._device = device
        self.ordinal = device.ordinal
        # Told each time: a default device of torch's would have tensors made elsewhere, as copies.
        self._torch_device = self._torch.device(f"cuda:{device.ordinal}")
        # Blocks without a view, each with the stream that may still use it.
        self._pending_returns: deque[tuple[SegmentRange, _StreamKey]] = deque()
        self._streams: dict[_StreamKey, Any] = {}

    def add_device_segment(self, number: int, descriptor: int, nbytes: int) -> None:
        """Take in what the server has made.

        Raises:
            ValueError: the descriptor is of no such memory, or there is a segment of that number.
        """
        try:
            segment = self._device.map_descriptor(descriptor, nbytes, _ClientDeviceSegment)
        except DeviceMemoryError as error:
            raise ValueError(f"the device's memory cannot be mapped: {error}") from None
        self._add_segment(MappedSegment(number, segment, segment.address, nbytes))

    def _make_blocks(self, places: Sequence[SegmentRange]) -> list[DeviceBlock]:
        return [DeviceBlock(self, place, self.get_address(place)) for place in places]

    def locate_tensor(self, tensor: Any) -> tuple[int, int] | None:
        """As `locate_address` of a contiguous tensor; None of any other."""
        return self.locate_address(tensor.data_ptr()) if tensor.is_contiguous() else None

    def make_tensor(self, block: DeviceBlock, dtype: DType, shape: tuple[int, ...]) -> Any:
        """A tensor in a block, which it keeps."""
        if math.prod(shape):
            return self.make_tensor_factory(dtype, shape)(block)
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype.label), device=self._torch_device)

    def make_unowned_tensor(self, place: SegmentRange, dtype: DType, shape: tuple[int, ...]) -> Any:
        """A tensor of at least one element at a place, which it does not keep; it can be written in any mode."""
        with self._torch.inference_mode(False):
            return self.make_tensor_factory(dtype, shape)(_UnownedAddress(self.get_address(place)))

    def make_tensor_factory(
        self, dtype: DType, shape: tuple[int, ...]
    ) -> Callable[["DeviceBlock | _UnownedAddress"], Any]:
        """What makes a tensor in a block, which it keeps; of at least one element."""
        as_tensor, device, typestr = self._torch.as_tensor, self._torch_device, _TYPES[dtype]
        of_torch = getattr(self._torch, dtype.label) if dtype in _NOT_OF_OTHERS else None

        def make(block: DeviceBlock | _UnownedAddress) -> Any:
            block.__cuda_array_interface__ = {
                "shape": shape,
                "typestr": typestr,
                "data": (block.address, False),
                "version": 2,
            }
            made = as_tensor(block, device=device)
            return made if of_torch is None else made.view(of_torch)

        return make

    def copy_into(self, tensor: Any, source: Any) -> None:
        """Copy to a tensor of the arena what another tensor, or memory of the host, has."""
        if isinstance(source, memoryview):
            if not len(source):
                return
            source = self._torch.frombuffer(source, dtype=tensor.dtype).view(tensor.shape)
        tensor.copy_(source)

    def find_busy_stream(self) -> "BusyStream | None":
        """What must be waited for before the server may read what the current stream writes, if anything.

        Raises:
            RuntimeError: the stream is being captured: the server is not a part of any graph.
        """
        key = self._get_current_stream()
        if key is None:
            raise RuntimeError("a call of the service cannot be captured in a CUDA graph")
        stream = self._get_stream(key)
        with self._lock:
            # Those alone are sure to come before what is asked now: threads share streams.
            dying = self._take_pending_returns()
            is_idle = stream.query()
            if dying:
                self._return_idle(dying, {key: is_idle})
        return None if is_idle else BusyStream(self._torch.cuda, stream)

    def queue_return(self, place: SegmentRange) -> None:
        try:
            key = self._get_current_stream()
            if key is None:
                # A replay of the graph that is being captured uses this memory.
                return
            if self._on_empty is None:
                self._pending_returns.append((place, key))
                return
            self._get_stream(key).synchronize()
        except Exception:
            # The process ends, or the device has failed: who knows what uses it still.
            return
        super().queue_return(place)

    def call_when_empty(self, then: Callable[[], None]) -> None:
        with self._lock:
            dying = self._take_pending_returns()
            for key in {key for _, key in dying}:
                self._get_stream(key).synchronize()
            self._returned_ranges.extend(place for place, _ in dying)
        super().call_when_empty(then)

    def unmap_segments(self) -> None:
        """Unmap all segments; no block of them is in use."""
        self._cached_ranges.clear()
        self._segments.clear()

    def _collect_returned(self) -> None:
        if self._pending_returns:
            dying = self._take_pending_returns()
            self._return_idle(dying, {key: self._get_stream(key).query() for key in {key for _, key in dying}})
        super()._collect_returned()

    def _take_pending_returns(self) -> list[tuple[SegmentRange, _StreamKey]]:
        return [self._pending_returns.popleft() for _ in range(len(self._pending_returns))]

    def _return_idle(
        self, dying: list[tuple[SegmentRange, _StreamKey]], are_idle: Mapping[_StreamKey, bool]
    ) -> None:
        """Places whose streams are idle have returned; the others go on waiting."""
        for place, key in dying:
            if are_idle.get(key):
                self._returned_ranges.append(place)
            else:
                self._pending_returns.append((place, key))

    def _get_current_stream(self) -> _StreamKey | None:
        """This thread's; None while it is captured."""
        inside = self._torch._C
        if inside._cuda_isCurrentStreamCapturing():
            return None
        # What torch.cuda.current_stream makes a new object of each time.
        key: _StreamKey = inside._cuda_getCurrentStream(self.ordinal)
        return key

    def _get_stream(self, key: _StreamKey) -> Any:
        stream = self._streams.get(key)
        if stream is None:
            number, index, kind = key
            stream = self._torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
            self._streams[key] = stream
        return stream


class BusyStream:
    """A stream has work that must be over first."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda = cuda
        self._stream = stream

    def wait_idle(self) -> None:
        """Until what the stream has now is over."""
        give_up = time.perf_counter() + _SPIN_S
        while not self._stream.query():
            if time.perf_counter() > give_up:
                event = self._cuda.Event(blocking=True)
                event.record(self._stream)
                event.synchronize()
                return


def make_device_arena(offer: Any) -> DeviceArena | None:
    """An arena in the memory of the device that a server offers; None where there is no use for it."""
    if not isinstance(offer, dict) or not isinstance(offer.get("uuid"), str):
        return None
    try:
        return DeviceArena(ShareableDevice.find_by_uuid(offer["uuid"]))
    except DeviceMemoryError as error:
        log.warning("tensors on the device are copied through host memory: %s", error)
        return None
