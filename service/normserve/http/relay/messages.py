"""Messages between a front end and the process that owns a device: lists of them, in MessagePack.

Both are processes of one server with the same code, so messages are trusted.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from normserve.http.measured import LaunchMeasurements
from normserve.http.responses import make_response_headers


class RequestHead(msgspec.Struct, array_like=True, gc=False):
    """What a request's header says, beside what its connection says of it: the same for many requests."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    http_version: str
    scheme: str
    server: tuple[str, int | None] | None


class RequestStarted(msgspec.Struct, array_like=True, tag=0, gc=False):
    """A request whose header is complete.

    Attributes:
        number: of all that this front end sends, this one's.
        head: a `RequestHead` in MessagePack.
        client: address and port; None on a Unix socket.
        announced: bytes of its body; None where it is chunked.
        body: if it came whole with the header.
        began: when the header was complete, by `time.perf_counter`.
        request_id: what an `OperationResponse` names it.
    """

    number: int
    head: bytes
    client: tuple[str, int] | None
    announced: int | None
    body: bytearray | None
    began: float
    request_id: str


class BodyReceived(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A body is whole, in the place that it was given; `ended` is when, by `time.perf_counter`."""

    number: int
    nbytes: int
    ended: float


class BodyProgress(msgspec.Struct, array_like=True, tag=2, gc=False):
    """How many bytes have come of bodies that take their time, by their requests."""

    received: dict[int, int]


class BodyPart(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The next of a body that has no place, as ASGI hands it out."""

    number: int
    data: bytes
    more: bool


class BodyAborted(msgspec.Struct, array_like=True, tag=4, gc=False):
    """A body that was to be received will not be; nothing is written to its place any more.

    Attributes: left: the client has gone.
    """

    number: int
    left: bool


class ClientDisconnected(msgspec.Struct, array_like=True, tag=5, gc=False):
    """The client has gone before its response was complete."""

    number: int


class ResponseSent(msgspec.Struct, array_like=True, tag=6, gc=False):
    """What was given to be sent has been taken by the kernel, or never will be.

    Attributes:
        seconds: since the response's first byte.
        is_delivered: the client was there when the last byte was taken.
    """

    number: int
    seconds: float
    is_delivered: bool


class RefusalCount(msgspec.Struct, array_like=True, tag=7, gc=False):
    """So many times a front end has answered with an error what never became a request here."""

    status: int
    code: str
    count: int


class LateDisconnectCount(msgspec.Struct, array_like=True, tag=8, gc=False):
    """So many clients left with a response that the kernel had taken and that they had not read."""

    count: int


class ConnectionCount(msgspec.Struct, array_like=True, tag=9, gc=False):
    """How many clients are connected now."""

    count: int


class FrontEndHello(msgspec.Struct, array_like=True, tag=10, gc=False):
    """The first message: which front end this is, and its process."""

    index: int
    pid: int


FromFrontEnd = (
    FrontEndHello
    | RequestStarted
    | BodyReceived
    | BodyProgress
    | BodyPart
    | BodyAborted
    | ClientDisconnected
    | ResponseSent
    | RefusalCount
    | LateDisconnectCount
    | ConnectionCount
)


class OwnerReadiness(msgspec.Struct, array_like=True, tag=0, gc=False):
    """Whether the process takes work."""

    is_ready: bool


class SharedSlabAdded(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Memory to be mapped, known by its number from now on; its descriptor comes along."""

    number: int


class SharedSlabRemoved(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Memory of which nothing will be said any more."""

    numbers: list[int]


class BodyLocation(msgspec.Struct, array_like=True, tag=3, gc=False):
    """Let a body of announced length come, into its place."""

    number: int
    memory: int
    offset: int
    nbytes: int


class BodyPartRequest(msgspec.Struct, array_like=True, tag=4, gc=False):
    """Let a body come in pieces: the next one, or all."""

    number: int
    all: bool


class BodyStopRequest(msgspec.Struct, array_like=True, tag=5, gc=False):
    """The rest of a body is not wanted.  If it had a place, `BodyAborted` answers, or `BodyReceived` was sent."""

    number: int


class SharedSlabRange(msgspec.Struct, array_like=True, gc=False):
    """Bytes that lie in shared memory."""

    memory: int
    offset: int
    nbytes: int


class CompleteResponse(msgspec.Struct, array_like=True, tag=6, gc=False):
    """A whole response; its body in pieces, of which short ones are here."""

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: list[bytes | SharedSlabRange]
    nbytes: int


class ResponsePart(msgspec.Struct, array_like=True, tag=7, gc=False):
    """A piece of a response, as ASGI has it; with the first come status and headers, else the status is 0."""

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    data: bytes
    more: bool


class ResponseAborted(msgspec.Struct, array_like=True, tag=8, gc=False):
    """The application has nothing more to say to a request, though its response is not complete."""

    number: int


class OperationResponse(msgspec.Struct, array_like=True, tag=9, gc=False):
    """A whole response with the result of an operation; the front end makes its header.

    Attributes:
        shared: headers for the page that sent the request.
        body: as of `CompleteResponse`.
    """

    number: int
    media_type: str
    measured: LaunchMeasurements
    shared: Sequence[tuple[bytes, bytes]]
    body: list[bytes | SharedSlabRange]

    def make_response(self, request_id: str) -> CompleteResponse:
        """The same with its header, for a request of this id."""
        nbytes = sum([each.nbytes if isinstance(each, SharedSlabRange) else len(each) for each in self.body])
        headers = [
            *make_response_headers(nbytes, self.media_type.encode(), self.measured.make_headers()),
            *self.shared,
            (b"x-request-id", request_id.encode()),
        ]
        return CompleteResponse(self.number, 200, headers, self.body, nbytes)


FromOwner = (
    OwnerReadiness
    | SharedSlabAdded
    | SharedSlabRemoved
    | BodyLocation
    | BodyPartRequest
    | BodyStopRequest
    | CompleteResponse
    | ResponsePart
    | ResponseAborted
    | OperationResponse
)

_encoder = msgspec.msgpack.Encoder()
encode, encode_into = _encoder.encode, _encoder.encode_into
read_head = msgspec.msgpack.Decoder(RequestHead).decode
from_front_end: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(list[FromFrontEnd])
from_owner: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(list[FromOwner])
