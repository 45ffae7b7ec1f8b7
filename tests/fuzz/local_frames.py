"""What a client says that shares memory."""

import contextlib

from normserve.codec import local_messages as local_codec
from normserve.codec.framing import FrameReader
from normserve.errors import MalformedPayloadError, NormserveError, TooLargeError
from normserve.local.segment_table import SegmentTable, check_result_ranges, require_same_memory_kind
from normserve.memory.device_segments import DeviceMemoryView, DeviceSegment
from normserve.memory.tensors import DeviceTensor

from tests.fuzz.streams import cut

_LOCAL_FRAME_BYTES = 1024


def local_frames(data: bytes) -> None:
    """What a client says that shares memory is the same messages however it is cut, about its own arena alone."""
    pieces, stream, _ = cut(data)
    whole = _local_frames_of([stream])
    assert _local_frames_of(pieces) == whole
    for _, content in whole[0]:
        with contextlib.suppress(MalformedPayloadError):
            messages = local_codec.decode_messages(content)
            assert list(local_codec.decode_messages(local_codec.encode_frame(0, list(messages))[8:])) == list(
                messages
            )
            for message in messages:
                if isinstance(message, local_codec.ComputeMessage):
                    _refers_to_its_arena(message)
        with contextlib.suppress(MalformedPayloadError):
            local_codec.decode_response(content)


def _local_frames_of(pieces: list[bytes]) -> tuple[list[tuple[int, bytes]], bool]:
    """The frames, and whether one was too long."""
    incoming, found = FrameReader(_LOCAL_FRAME_BYTES), []
    try:
        for piece in pieces:
            found += incoming.feed(piece)
    except TooLargeError:
        # What was whole before it, in the same piece, goes with the connection.
        return [], True
    return found, False


class _OnDevice(DeviceSegment):
    """Memory of a device that is nowhere."""

    def __init__(self) -> None:
        super().__init__(None, None, 2**40, 4096)  # type: ignore[arg-type]

    def __del__(self) -> None:
        pass


def _refers_to_its_arena(message: local_codec.ComputeMessage) -> None:
    """Segment 0 is the host's, segment 1 a device's."""
    arena = SegmentTable()
    memories = [memoryview(bytearray(4096)), _OnDevice().view()]
    for memory in memories:
        arena.add_segment(memory)
    with contextlib.suppress(NormserveError):
        located = {name: arena.find_tensor(name, each) for name, each in message.tensors.items()}
        for tensor, span in located.values():
            assert tensor.data.obj is memories[span.segment].obj
            assert len(tensor.data) == tensor.nbytes == span.stop - span.start
            assert isinstance(tensor, DeviceTensor) == (span.segment == 1)
            _lies_within(tensor.data)
        places = {name: arena.find_result_buffer(name, place) for name, place in message.results.items()}
        for name, place in message.results.items():
            assert len(places[name]) == place.nbytes
            _lies_within(places[name])
        require_same_memory_kind({name: tensor for name, (tensor, _) in located.items()}, places)
        described = {name: (tensor.dtype, tensor.shape) for name, (tensor, _) in located.items()}
        check_result_ranges(
            described, message.results, {name: span for name, (_, span) in located.items()}, {"y": "x"}
        )


def _lies_within(data: memoryview) -> None:
    if isinstance(data, DeviceMemoryView):
        start = data.__cuda_array_interface__["data"][0] - data.obj.address  # type: ignore[index]
        assert 0 <= start <= start + len(data) <= len(data.obj)
