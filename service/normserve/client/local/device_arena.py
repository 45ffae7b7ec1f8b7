"""The device memory that a server offers to a connection, divided into blocks by the client alone.

A block returns after its last view, once the stream that was current at the end of that view is found idle: until
then, kernels may still read or write the memory.  Where other libraries have views, too, the device must be idle.
"""

import importlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from normserve.client.calls.foreign_arrays import EXPORTED_DEVICES
from normserve.client.local.allocator import ArenaAllocator, HostArena, MappedSegment
from normserve.codec.local_messages import SegmentRange
from normserve.memory.device_segments import DeviceMemoryError, DeviceSegment, ShareableDevice
from normserve.memory.tensors import DType

log = logging.getLogger(__name__)

# Small kernels are over sooner than a thread is woken.
_SPIN_S = 50e-6

# Element types of the CUDA array interface, which has no bfloat16 and no float8.
_TYPES = {DType.FLOAT32: "<f4", DType.FLOAT16: "<f2", DType.BFLOAT16: "<i2", DType.FLOAT8_E4M3FN: "|u1"}
_NOT_OF_OTHERS = (DType.BFLOAT16, DType.FLOAT8_E4M3FN)

_UNKNOWN = object()

# Of a stream: its number, the index of its device and the type of that, as torch has them.
_StreamKey = tuple[int, int, int]

# In place of a stream: kernels of any stream may use the range, also of one that torch does not know.
_ANY_STREAM = (0, 0, 0)


class DeviceBlock:
    """An allocated block of device memory shared with the server; a tensor made over the block keeps it alive.

    Attributes:
        segment_range: the segment, offset and size of the bytes.
    """

    __slots__ = ("__cuda_array_interface__", "_arena", "address", "segment_range")

    __cuda_array_interface__: dict[str, object]

    def __init__(self, home: "DeviceArena", place: SegmentRange, address: int) -> None:
        self.segment_range = place
        self.address = address
        self._arena = home

    def __del__(self) -> None:
        self._arena.enqueue_release(self.segment_range)


class _UnownedAddress:
    """A device address over which torch can make a tensor that does not keep the memory allocated."""

    __slots__ = ("__cuda_array_interface__", "address")

    __cuda_array_interface__: dict[str, object]

    def __init__(self, address: int) -> None:
        self.address = address


class _SynchronisingDeviceSegment(DeviceSegment):
    """A client's mapping of shared device memory, unmapped only after the device has finished its work."""

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
    """The memory of one CUDA device that a connection shares with the server: segments, divided into blocks.

    Threads share it.  A block whose last view has ended stays in use while kernels on the stream that was
    current then may still access its memory.

    Attributes:
        ordinal: torch's index of the device.
    """

    def __init__(self, device: ShareableDevice) -> None:
        super().__init__()
        self._torch: Any = importlib.import_module("torch")
        self._device = device
        self.ordinal = device.ordinal
        # Passed explicitly: with another default device of torch's, tensors would be copies in other memory.
        self._torch_device = self._torch.device(f"cuda:{device.ordinal}")
        # Blocks without a view, each with the stream that may still use it.
        self._pending_returns: deque[tuple[SegmentRange, _StreamKey]] = deque()
        self._streams: dict[_StreamKey, Any] = {}

    def add_device_segment(self, number: int, descriptor: int, nbytes: int) -> None:
        """Map a segment that the server has made, and add it to the arena.

        Args:
            number: the server's number of the segment.
            descriptor: the file descriptor of the segment, received from the server.

        Raises:
            ValueError: the descriptor is of no such memory, or there is a segment of that number.
        """
        try:
            segment = self._device.map_descriptor(descriptor, nbytes, _SynchronisingDeviceSegment)
        except DeviceMemoryError as error:
            raise ValueError(f"the device's memory cannot be mapped: {error}") from None
        self._add_segment(MappedSegment(number, segment, segment.address, nbytes))

    def _make_blocks(self, places: Sequence[SegmentRange]) -> list[DeviceBlock]:
        """Make a block for each range.  When the last view of a block has ended, the block queues the release of
        its range.
        """
        return [DeviceBlock(self, place, self.get_address(place)) for place in places]

    def locate_tensor(self, tensor: Any) -> tuple[int, int] | None:
        """Return the number of the segment that contains a tensor, and the tensor's offset in the segment.

        None if no segment contains the tensor, or if it is not contiguous or not aligned.
        """
        return self.locate_address(tensor.data_ptr()) if tensor.is_contiguous() else None

    def make_tensor(self, block: DeviceBlock, dtype: DType, shape: tuple[int, ...]) -> Any:
        """Make a tensor over a block of shared memory; the tensor keeps the block alive."""
        if math.prod(shape):
            return self.make_tensor_factory(dtype, shape)(block)
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype.label), device=self._torch_device)

    def make_unowned_tensor(self, place: SegmentRange, dtype: DType, shape: tuple[int, ...]) -> Any:
        """Make a tensor, of at least one element, over a range of shared memory.  The tensor does not keep the
        range allocated.

        It is no inference tensor, so that it can be a target of copies in any mode.
        """
        with self._torch.inference_mode(False):
            return self.make_tensor_factory(dtype, shape)(_UnownedAddress(self.get_address(place)))

    def make_tensor_factory(
        self, dtype: DType, shape: tuple[int, ...]
    ) -> Callable[["DeviceBlock | _UnownedAddress"], Any]:
        """Return a function that makes a tensor of this dtype and shape over a block.  The tensor keeps the block
        alive.

        The shape must have at least one element.
        """
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

    def copy_into(self, target: Any, source: Any) -> None:
        """Copy a tensor, or bytes in host memory, into a tensor in shared memory."""
        if isinstance(source, memoryview):
            if not len(source):
                return
            source = self._torch.frombuffer(source, dtype=target.dtype).view(target.shape)
        target.copy_(source)

    def find_busy_stream(self) -> "BusyStream | None":
        """Return the current stream if it has unfinished work; None if it is idle.

        The work may still write a call's tensors, so the caller must wait for the stream before the server reads
        them.  Ranges without views that wait for this stream become free if it is idle.

        Raises:
            RuntimeError: the stream is being captured: the server is not a part of any graph.
        """
        key = self._get_stream_key_unless_capturing()
        if key is None:
            raise RuntimeError("a call of the service cannot be captured in a CUDA graph")
        stream = self._get_or_make_stream(key)
        with self._lock:
            # Only ranges queued before the query are covered by its result: threads share streams.
            dying = self._take_pending_returns()
            is_idle = stream.query()
            if dying:
                self._return_idle(dying, {key: is_idle})
        return None if is_idle else BusyStream(self._torch.cuda, stream)

    def enqueue_release(self, place: SegmentRange) -> None:
        """Queue the release of a range that no tensor views any more.  The range becomes free when the work now on
        the current stream has finished.

        Under CUDA graph capture the range is never free again, because replays of the graph use its memory.
        After `call_when_empty` no allocation would check the stream later, so this waits for the stream.
        """
        try:
            key = self._get_stream_key_unless_capturing()
            if key is None:
                # A replay of the graph that is being captured uses this memory.
                return
            if self.ordinal in EXPORTED_DEVICES:
                key = _ANY_STREAM
            if self._on_empty is None:
                self._pending_returns.append((place, key))
                return
            self._synchronise(key)
        except Exception:
            # The process ends, or the device has failed: the range may still be in use.
            return
        super().enqueue_release(place)

    def call_when_empty(self, then: Callable[[], None]) -> None:
        """Call `then` as soon as no range is in use, at once if none is.  Nothing may be allocated after this call.

        Streams that may still use ranges without views are waited for first.
        """
        with self._lock:
            dying = self._take_pending_returns()
            for key in {key for _, key in dying}:
                self._synchronise(key)
            self._returned_ranges.extend(place for place, _ in dying)
        super().call_when_empty(then)

    def unmap_segments(self) -> None:
        """Unmap all segments, whose blocks must all have returned."""
        self._cached_ranges.clear()
        self._segments.clear()

    def _collect_returned(self) -> None:
        """Free the queued ranges whose streams are idle; ranges whose streams are still busy stay queued."""
        if self._pending_returns:
            dying = self._take_pending_returns()
            self._return_idle(dying, {key: self._is_idle(key) for key in {key for _, key in dying}})
        super()._collect_returned()

    def _count_queued_returns(self) -> int:
        return super()._count_queued_returns() + len(self._pending_returns)

    def _take_pending_returns(self) -> list[tuple[SegmentRange, _StreamKey]]:
        return [self._pending_returns.popleft() for _ in range(len(self._pending_returns))]

    def _return_idle(
        self, pending_returns: list[tuple[SegmentRange, _StreamKey]], are_idle: Mapping[_StreamKey, bool]
    ) -> None:
        """Queue the ranges whose streams are idle to become free, and keep the other ranges pending.

        Args:
            pending_returns: ranges without views, each with the stream that may still use it.
            are_idle: whether each stream is idle; a missing stream counts as busy.
        """
        for place, key in pending_returns:
            if are_idle.get(key):
                self._returned_ranges.append(place)
            else:
                self._pending_returns.append((place, key))

    def _is_idle(self, key: _StreamKey) -> bool:
        """Return whether a stream is idle.  For any stream the answer is yes, after waiting for the device."""
        if key != _ANY_STREAM:
            return bool(self._get_or_make_stream(key).query())
        self._synchronise(key)
        return True

    def _synchronise(self, key: _StreamKey) -> None:
        """Wait until a stream has finished its work; for any stream, until the device has."""
        if key == _ANY_STREAM:
            self._torch.cuda.synchronize(self.ordinal)
        else:
            self._get_or_make_stream(key).synchronize()

    def _get_stream_key_unless_capturing(self) -> _StreamKey | None:
        """Return the key of this thread's current stream; None while a CUDA graph is captured on the stream."""
        inside = self._torch._C
        if inside._cuda_isCurrentStreamCapturing():
            return None
        # `torch.cuda.current_stream` would make a new object of this key each time.
        key: _StreamKey = inside._cuda_getCurrentStream(self.ordinal)
        return key

    def _get_or_make_stream(self, key: _StreamKey) -> Any:
        """Return torch's stream object for a key, made at the first use of the key."""
        stream = self._streams.get(key)
        if stream is None:
            number, index, kind = key
            stream = self._torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
            self._streams[key] = stream
        return stream


class BusyStream:
    """A CUDA stream with unfinished work, for which the caller must wait."""

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda = cuda
        self._stream = stream

    def wait_idle(self) -> None:
        """Wait until the work that the stream has now is finished: poll for a short time, then sleep."""
        give_up = time.perf_counter() + _SPIN_S
        while not self._stream.query():
            if time.perf_counter() > give_up:
                event = self._cuda.Event(blocking=True)
                event.record(self._stream)
                event.synchronize()
                return


def try_make_device_arena(offer: Any) -> DeviceArena | None:
    """Make the arena of shared memory for the device that a server offers.  Return None if the offer is invalid or
    the device cannot be used.

    Args: offer: the server's description of its device, an object with the device's `uuid`.
    """
    if not isinstance(offer, dict) or not isinstance(offer.get("uuid"), str):
        return None
    try:
        return DeviceArena(ShareableDevice.find_by_uuid(offer["uuid"]))
    except DeviceMemoryError as error:
        log.warning("tensors on the device are copied through host memory: %s", error)
        return None


# The pending clean-up of closed connections whose arenas are still in use.
_LEAVING: dict["DeviceMemoryOffer", Callable[[], None]] = {}


class DeviceMemoryOffer:
    """The server's offer of device memory to one connection, and the arena made from the offer."""

    def __init__(self) -> None:
        self._offer: object = _UNKNOWN
        self._arena: DeviceArena | None = None
        self._is_arena_made = False

    @property
    def is_known(self) -> bool:
        """Whether the server has stated its offer, which it cannot do while it starts."""
        return self._offer is not _UNKNOWN

    def read_hello_document(self, greeting: Any) -> None:
        """Read the offer in the server's greeting."""
        if isinstance(greeting, dict):
            self._offer = greeting.get("device", _UNKNOWN)

    def get_or_make_arena(self, index: int) -> DeviceArena | None:
        """Return the arena of the device with this index, made at the first call.

        None if the server offers no memory of that device, or the memory cannot be shared.

        Args: index: torch's index of the device.
        """
        if not self._is_arena_made and self.is_known:
            self._is_arena_made = True
            self._arena = try_make_device_arena(self._offer)
        arena = self._arena
        return arena if arena is not None and index == arena.ordinal else None

    def add_device_segment(self, number: int, descriptor: int, nbytes: int) -> None:
        """Map a segment that the server has made, and add it to the device's arena.

        Raises:
            ValueError: no device memory was requested, the descriptor is of no such memory, or there is a
                segment of that number.
        """
        if self._arena is None:
            raise ValueError("the server sent device memory that was not requested")
        self._arena.add_device_segment(number, descriptor, nbytes)

    def call_when_empty(self, host: HostArena, then: Callable[[], None]) -> None:
        """Call `then` as soon as no block of the host's or the device's arena is in use, at once if none is.
        Nothing may be allocated after this call.

        Until then the connection is kept: the memory stays mapped for a captured graph, and a block in a
        reference cycle is collected without the connection's open socket.
        """
        device = self._arena

        def finish() -> None:
            # Not by its own name, which would be a cycle: the memory is unmapped now, and not by the collector.
            _LEAVING.pop(self, None)
            then()

        _LEAVING[self] = finish
        host.call_when_empty(finish if device is None else lambda: device.call_when_empty(finish))

    def unmap_segments(self) -> Sequence[int]:
        """Unmap all segments of the device's memory and return their numbers."""
        if self._arena is None:
            return ()
        numbers = self._arena.segment_numbers
        self._arena.unmap_segments()
        return numbers
