"""What fuzzing runs on each input: whatever a stranger sends is understood as others understand it, or refused.

A harness takes the input's bytes.  It may raise nothing: errors of `normserve.errors` are refusals, which is what
hostile input should meet; any other exception is a fault.
"""

import asyncio
import contextlib
import functools
import io
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import safetensors
from normserve.codec import local_frames as local_codec
from normserve.codec import npy as npy_codec
from normserve.codec import safetensors as safetensors_codec
from normserve.errors import InvalidParameterError, MalformedPayloadError, NormserveError, TooLargeError
from normserve.http.routes.negotiation import Accepted, declared_format, sniffed_format
from normserve.jobs.job import Op, Pass
from normserve.local.arena import Arena, check_places, check_together
from normserve.memory.allocations import HANDLE_BYTES, OpenedAllocation, open_allocation
from normserve.memory.device_segments import DeviceBytes, DeviceSegment
from normserve.memory.device_tensors import DeviceTensor
from normserve.peers import siblings
from normserve.peers.siblings import Link, RefusedError
from normserve.requests.parameters import make_spec, operation_parameters, parse_query

from tests.service.http.transport.drive import Answer, drive

_NUMPY_HEADER_BYTES = 10_000
_CUTS = struct.Struct(">B4H")
# Small, so that inputs of a few bytes meet every limit.
_FRAME_BYTES = 40
_READER_BYTES = 64
_LOCAL_FRAME_BYTES = 1024
_READ_BYTES = 128


def safetensors_payload(data: bytes) -> None:
    """What the strict parser accepts, the usual library reads as the same tensors, and it survives a round trip."""
    try:
        tensors = safetensors_codec.decode(memoryview(data))
    except NormserveError:
        return
    expected = dict(safetensors.deserialize(data))
    assert expected.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tuple(expected[name]["shape"]) == tensor.shape
        assert bytes(expected[name]["data"]) == bytes(tensor.data)
        assert tensor.data.nbytes == tensor.nbytes
    again = safetensors_codec.decode(memoryview(b"".join(safetensors_codec.encode(tensors))))
    assert {name: (each.shape, bytes(each.data)) for name, each in again.items()} == {
        name: (each.shape, bytes(each.data)) for name, each in tensors.items()
    }


def npy_payload(data: bytes) -> None:
    """What the grammar accepts, numpy reads as the same array, and it survives a round trip."""
    try:
        tensor = npy_codec.decode(memoryview(data))
    except NormserveError:
        return
    if len(data) - tensor.nbytes <= _NUMPY_HEADER_BYTES:
        expected = np.load(io.BytesIO(data), allow_pickle=False)
        assert expected.shape == tensor.shape
        assert expected.tobytes("F" if tensor.fortran_order else "C") == bytes(tensor.data)
    if not tensor.fortran_order:
        again = npy_codec.decode(memoryview(b"".join(npy_codec.encode(tensor))))
        assert (again.shape, bytes(again.data)) == (tensor.shape, bytes(tensor.data))


def query(data: bytes) -> None:
    """A query string is an operation or is refused; the same one is the same operation."""
    op = (Op.LAYER_NORM, Op.RMS_NORM, Op.GROUP_NORM)[data[0] % 3] if data else Op.LAYER_NORM
    direction = Pass.BACKWARD if data[:1] and data[0] & 128 else Pass.FORWARD
    parameters = operation_parameters(op, direction)
    with contextlib.suppress(InvalidParameterError):
        spec = make_spec(op, direction, parse_query(data[1:], parameters))
        assert hash(spec) == hash(make_spec(op, direction, parse_query(data[1:], parameters)))
        assert spec.eps > 0
        assert 0 <= spec.dropout < 1
        assert spec.num_groups >= 0


def headers(data: bytes) -> None:
    """Content-Type, Content-Encoding and Accept, one a line, and a body's first bytes."""
    content_type, _, rest = data.partition(b"\n")
    content_encoding, _, rest = rest.partition(b"\n")
    accept, _, body = rest.partition(b"\n")
    with contextlib.suppress(NormserveError):
        declared = declared_format(content_type.decode("latin-1"), content_encoding.decode("latin-1"))
        request_format = declared or sniffed_format(memoryview(body))
        assert Accepted(accept.decode("latin-1")).choose(request_format) in (
            "application/x-safetensors",
            "application/x-npy",
        )


def http(data: bytes) -> None:
    """A connection's bytes become the same requests and answers however they are cut; no answer is a 500."""
    pieces, stream, options = _cut(data)
    ends = bool(options & 2)
    whole = _run(drive([stream], ends=ends))
    assert not any(isinstance(each, Answer) and each.status == 500 for each in whole)
    assert _run(drive(pieces, settles=bool(options & 1), ends=ends)) == whole


def sibling_frames(data: bytes) -> None:
    """What a process of the fleet says is frames or ends the connection, and so is what it answers."""
    pieces, stream, _ = _cut(data)
    expected, ends_whole = _frames_of(stream, _FRAME_BYTES)
    heard: list[bytes] = []
    assert _run(_frames_end_whole(pieces, heard)) == ends_whole
    assert heard == expected
    answers, _ = _frames_of(stream, len(stream))
    try:
        assert [b"+" + _run(_answer_in(pieces))] == answers[:1]
    except RefusedError:
        assert not answers[0].startswith(b"+")
    except ConnectionError:
        assert not answers


def local_frames(data: bytes) -> None:
    """What a client says that shares memory is the same messages however it is cut, about its own arena alone."""
    pieces, stream, _ = _cut(data)
    whole = _local_frames_of([stream])
    assert _local_frames_of(pieces) == whole
    for _, content in whole[0]:
        with contextlib.suppress(MalformedPayloadError):
            messages = local_codec.read_messages(content)
            assert list(local_codec.read_messages(local_codec.write(0, list(messages))[8:])) == list(messages)
            for message in messages:
                if isinstance(message, local_codec.Compute):
                    _refers_to_its_arena(message)
                if isinstance(message, local_codec.Own):
                    _opens_what_it_says(message)
        with contextlib.suppress(MalformedPayloadError):
            local_codec.read_answer(content)


def _local_frames_of(pieces: list[bytes]) -> tuple[list[tuple[int, bytes]], bool]:
    """The frames, and whether one was too long."""
    incoming, found = local_codec.Frames(_LOCAL_FRAME_BYTES), []
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


def _refers_to_its_arena(message: local_codec.Compute) -> None:
    """Segment 0 is the host's, segment 1 a device's."""
    arena = Arena()
    memories = [memoryview(bytearray(4096)), _OnDevice().whole()]
    for memory in memories:
        arena.add(memory)
    with contextlib.suppress(NormserveError):
        located = {name: arena.tensor(name, each) for name, each in message.tensors.items()}
        for tensor, span in located.values():
            assert tensor.data.obj is memories[span.segment].obj
            assert len(tensor.data) == tensor.nbytes == span.stop - span.start
            assert isinstance(tensor, DeviceTensor) == (span.segment == 1)
            _lies_within(tensor.data)
        places = {name: arena.place(name, place) for name, place in message.results.items()}
        for name, place in message.results.items():
            assert len(places[name]) == place.nbytes
            _lies_within(places[name])
        check_together({name: tensor for name, (tensor, _) in located.items()}, places)
        described = {name: (tensor.dtype, tensor.shape) for name, (tensor, _) in located.items()}
        check_places(described, message.results, {name: span for name, (_, span) in located.items()}, {"y": "x"})


def _lies_within(data: memoryview) -> None:
    if isinstance(data, DeviceBytes):
        start = data.__cuda_array_interface__["data"][0] - data.obj.address  # type: ignore[index]
        assert 0 <= start <= start + len(data) <= len(data.obj)


class _Opening:
    """A driver that opens any handle, as memory of 4096 bytes whose last 1024 the handle points to."""

    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=9)

    def __init__(self) -> None:
        self.opened = 0

    def CUipcMemHandle(self) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace()

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[int, int]:  # noqa: N802
        assert len(handle.reserved) == HANDLE_BYTES
        self.opened += 1
        return 0, 2**40 + 3072

    def cuIpcCloseMemHandle(self, address: int) -> tuple[int]:  # noqa: N802
        self.opened -= 1
        return (0,)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:  # noqa: N802
        return 0, 2**40, 4096

    def cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[int, int]:  # noqa: N802
        return 0, 0


def _opens_what_it_says(message: local_codec.Own) -> None:
    """An allocation is open if it has what the message says, and closed else, and afterwards."""
    driver = _Opening()
    device: Any = SimpleNamespace(driver=driver, ordinal=0, current=contextlib.nullcontext)
    try:
        opened = open_allocation(device, bytes.fromhex(message.handle), message.nbytes, OpenedAllocation)
    except ValueError:
        assert not 0 < message.nbytes <= 1024
    else:
        assert len(opened) == message.nbytes <= 1024
        assert driver.opened == 1
        del opened
    assert driver.opened == 0


def _cut(data: bytes) -> tuple[list[bytes], bytes, int]:
    """A stream in pieces and whole, and a byte of options: the first bytes say where it is cut."""
    options, *places = _CUTS.unpack(data[: _CUTS.size].ljust(_CUTS.size, b"\0"))
    stream = data[_CUTS.size :]
    ends = [*sorted({place % (len(stream) + 1) for place in places}), len(stream)]
    return [stream[start:end] for start, end in pairwise([0, *ends])], stream, options


_loop = functools.cache(asyncio.new_event_loop)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """The same loop for all inputs; what goes wrong in a callback is raised, too."""
    faults: list[dict[str, Any]] = []
    _loop().set_exception_handler(lambda loop, context: faults.append(context))
    result = _loop().run_until_complete(work)
    assert not faults, faults
    return result


def _frames_of(stream: bytes, at_most: int) -> tuple[list[bytes], bool]:
    """The frames up to one that is too long or cut off, and whether there is none of those."""
    frames: list[bytes] = []
    while len(stream) >= 4:
        end = 4 + int.from_bytes(stream[:4])
        if end - 4 > at_most or end > len(stream):
            return frames, False
        frames.append(stream[4:end])
        stream = stream[end:]
    return frames, not stream


class _Arriving:
    """A connection on which bytes come in pieces, and what is said is heard by nobody."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._is_paused = False
        self.unread = 0
        self.reader = asyncio.StreamReader(limit=_READER_BYTES)
        self.reader.set_transport(self)  # type: ignore[arg-type]

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass

    async def arrive(self) -> None:
        for piece in self._pieces:
            for start in range(0, len(piece), _READ_BYTES):
                while self._is_paused:
                    await asyncio.sleep(0)
                read = piece[start : start + _READ_BYTES]
                self.unread += len(read)
                self.reader.feed_data(read)
                # Whoever reads has its turn, and if it needs more the next piece comes.
                await asyncio.sleep(0)
        self.reader.feed_eof()


@contextlib.asynccontextmanager
async def _arriving(pieces: list[bytes]) -> AsyncIterator[_Arriving]:
    connection = _Arriving(pieces)
    arrival = asyncio.create_task(connection.arrive())
    try:
        yield connection
    finally:
        arrival.cancel()


async def _frames_end_whole(pieces: list[bytes], heard: list[bytes]) -> bool:
    """Gather the frames; whether the connection ended between two."""
    async with _arriving(pieces) as connection:
        with contextlib.suppress(ConnectionError):
            while (frame := await siblings._receive(connection.reader, _FRAME_BYTES)) is not None:
                heard.append(frame)
                connection.unread -= 4 + len(frame)
                assert connection.unread <= 4 + _FRAME_BYTES + 2 * _READER_BYTES + _READ_BYTES
            return True
        assert connection.unread <= 4 + _FRAME_BYTES + 2 * _READER_BYTES + _READ_BYTES
        return False


async def _answer_in(pieces: list[bytes]) -> bytes:
    async with _arriving(pieces) as connection:
        link = Link(0, connection.reader, connection)  # type: ignore[arg-type]
        return await link.ask({"do": "metrics"}, timeout_s=60)


_ALL = (safetensors_payload, npy_payload, query, headers, http, sibling_frames, local_frames)
HARNESSES: MappingProxyType[str, Callable[[bytes], None]] = MappingProxyType({each.__name__: each for each in _ALL})
