"""Messages between a front end and the process that owns a device: lists of them, in MessagePack.

Both are processes of one server with the same code, so messages are trusted.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from normserve.http.launch_measurements import LaunchMeasurements
from normserve.http.responses import make_response_headers


class RequestHead(msgspec.Struct, array_like=True, gc=False):
    """A request's header, without the data of its connection, so that many requests have equal heads."""

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
        number: the request's number among all requests of this front end.
        head: a `RequestHead` in MessagePack.
        client: address and port; None on a Unix socket.
        announced: the length of its body in bytes; None if the body is chunked.
        body: the body, if it was received completely with the header.
        began: when the header was complete, by `time.perf_counter`.
        request_id: the id that the response to an operation has in its `x-request-id` header.
    """

    number: int
    head: bytes
    client: tuple[str, int] | None
    announced: int | None
    body: bytearray | None
    began: float
    request_id: str


class BodyReceived(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A body that has been received completely into its slab, at the time `ended` of `time.perf_counter`."""

    number: int
    nbytes: int
    ended: float


class BodyProgress(msgspec.Struct, array_like=True, tag=2, gc=False):
    """The bytes received so far of slow bodies, by request number."""

    received: dict[int, int]


class BodyPart(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The next piece of a body that is not received into a slab, as in an ASGI message."""

    number: int
    data: bytes
    more: bool


class BodyAborted(msgspec.Struct, array_like=True, tag=4, gc=False):
    """The end of an incomplete reception: the front end no longer writes to the body's slab.

    Attributes: is_client_disconnected: whether the client has disconnected.
    """

    number: int
    is_client_disconnected: bool


class ClientDisconnected(msgspec.Struct, array_like=True, tag=5, gc=False):
    """A client that disconnected before its response was complete."""

    number: int


class ResponseSent(msgspec.Struct, array_like=True, tag=6, gc=False):
    """The end of sending a response or a part: the kernel has taken all its bytes, or never will.

    Attributes:
        seconds: since the response's first byte.
        is_delivered: the client was connected when the kernel took the response's last byte.
    """

    number: int
    seconds: float
    is_delivered: bool


class RefusalCount(msgspec.Struct, array_like=True, tag=7, gc=False):
    """The number of times that a front end answered with this error without relaying a request."""

    status: int
    code: str
    count: int


class LateDisconnectCount(msgspec.Struct, array_like=True, tag=8, gc=False):
    """The number of clients that disconnected without reading a response that the kernel had taken."""

    count: int


class ConnectionCount(msgspec.Struct, array_like=True, tag=9, gc=False):
    """The number of clients that are connected now."""

    count: int


class FrontEndHello(msgspec.Struct, array_like=True, tag=10, gc=False):
    """The first message of a front end: its index, and the id of its process."""

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
    """The readiness of the owner: whether it accepts work."""

    is_ready: bool


class SharedSlabAdded(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A slab to map, with the number that later messages use; its file descriptor is sent with the message."""

    number: int


class SharedSlabRemoved(msgspec.Struct, array_like=True, tag=2, gc=False):
    """Slabs that no later message refers to, by number."""

    numbers: list[int]


class BodyIntoSlabRequest(msgspec.Struct, array_like=True, tag=3, gc=False):
    """A request to receive a body of announced length into this range of a shared slab."""

    number: int
    memory: int
    offset: int
    nbytes: int


class BodyPartRequest(msgspec.Struct, array_like=True, tag=4, gc=False):
    """A request to receive a body in pieces: the next one, or all."""

    number: int
    all: bool


class BodyStopRequest(msgspec.Struct, array_like=True, tag=5, gc=False):
    """A request to stop the reception of a body.

    If the body is received into a slab, `BodyAborted` answers, or `BodyReceived` was sent before.
    """

    number: int


class SharedSlabRange(msgspec.Struct, array_like=True, gc=False):
    """A range of bytes in a shared slab."""

    memory: int
    offset: int
    nbytes: int


class CompleteResponse(msgspec.Struct, array_like=True, tag=6, gc=False):
    """A complete response; its body is in pieces, of which short ones are part of the message."""

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: list[bytes | SharedSlabRange]
    nbytes: int


class ResponsePart(msgspec.Struct, array_like=True, tag=7, gc=False):
    """A piece of a response, as in an ASGI message; the first has status and headers, others the status 0."""

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    data: bytes
    more: bool


class ResponseAborted(msgspec.Struct, array_like=True, tag=8, gc=False):
    """A response that stays incomplete, because the application has ended without completing it."""

    number: int


class OperationResponse(msgspec.Struct, array_like=True, tag=9, gc=False):
    """A complete response with the result of an operation; the front end makes its header.

    Attributes:
        shared: CORS headers for the web page that sent the request.
        body: as in `CompleteResponse`.
    """

    number: int
    media_type: str
    measured: LaunchMeasurements
    shared: Sequence[tuple[bytes, bytes]]
    body: list[bytes | SharedSlabRange]

    def make_response(self, request_id: str) -> CompleteResponse:
        """Return the response with its header, for the request with this id."""
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
    | BodyIntoSlabRequest
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
