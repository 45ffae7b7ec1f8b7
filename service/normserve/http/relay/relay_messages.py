"""Messages between a front end and the process that owns a device, sent as lists in MessagePack.

Both are processes of one server with the same code, so messages are trusted.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from normserve.http.launch_measurements import LaunchMeasurements
from normserve.http.responses import make_response_headers


class RequestHead(msgspec.Struct, array_like=True, gc=False):
    """The head of an HTTP request; it has no data of the connection, so that repeated requests have equal heads.

    The owner parses equal heads only once.
    """

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    http_version: str
    scheme: str
    server: tuple[str, int | None] | None


class RequestStarted(msgspec.Struct, array_like=True, tag=0, gc=False):
    """A front end's announcement of a request whose header is complete.

    Attributes:
        number: the request's number among all requests of this front end.
        head: a `RequestHead` in MessagePack.
        client: address and port; None on a Unix socket.
        content_length: the length of the body in bytes; None if the body is chunked.
        body: the body, if it was received completely with the header.
        began: when the header was complete, by `time.perf_counter`.
        request_id: the id that the response to an operation has in its `x-request-id` header.
    """

    number: int
    head: bytes
    client: tuple[str, int] | None
    content_length: int | None
    body: bytearray | None
    began: float
    request_id: str


class BodyReceived(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A front end's report that it has received a complete body into its range of a shared slab.

    Attributes:
        nbytes: the body's length.
        ended: when the last byte was received, by `time.perf_counter`.
    """

    number: int
    nbytes: int
    ended: float


class BodyProgress(msgspec.Struct, array_like=True, tag=2, gc=False):
    """A front end's report of how many bytes of incomplete bodies it has received so far.

    Attributes:
        received: the number of bytes, by request number.
    """

    received: dict[int, int]


class BodyPart(msgspec.Struct, array_like=True, tag=3, gc=False):
    """The next piece of a body that the front end sends in messages, and does not write to a slab.

    Attributes:
        more: whether more pieces follow.
    """

    number: int
    data: bytes
    more: bool


class BodyAborted(msgspec.Struct, array_like=True, tag=4, gc=False):
    """A front end's report that it has stopped receiving an incomplete body.

    From now on it does not write to the body's slab.

    Attributes: is_client_disconnected: whether the client has disconnected.
    """

    number: int
    is_client_disconnected: bool


class ClientDisconnected(msgspec.Struct, array_like=True, tag=5, gc=False):
    """A front end's report that a client disconnected before its response was complete."""

    number: int


class ResponseSent(msgspec.Struct, array_like=True, tag=6, gc=False):
    """A front end's report that the operating system has taken all bytes of a response or a piece.

    It is also sent if the client has disconnected, so that the operating system will never take them.

    Attributes:
        seconds: since the response's first byte.
        is_delivered: the client was connected when the operating system took the response's last byte.
        ended: when it took that byte, by `time.perf_counter`; 0 if it did not.
    """

    number: int
    seconds: float
    is_delivered: bool
    ended: float = 0.0


class RefusalCount(msgspec.Struct, array_like=True, tag=7, gc=False):
    """A front end's number of error responses of one kind since its last report.

    These are responses to requests and invalid input that it did not relay.
    """

    status: int
    code: str
    count: int


class UnreadResponseCount(msgspec.Struct, array_like=True, tag=8, gc=False):
    """The number of clients that disconnected without reading a response, since the last report.

    The operating system had taken these responses, so they count as delivered.
    """

    count: int


class ConnectionCount(msgspec.Struct, array_like=True, tag=9, gc=False):
    """The number of clients that are now connected to the front end."""

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
    | UnreadResponseCount
    | ConnectionCount
)


class OwnerReadiness(msgspec.Struct, array_like=True, tag=0, gc=False):
    """A heartbeat that states whether the process that owns the device accepts work."""

    is_ready: bool


class SharedSlabAdded(msgspec.Struct, array_like=True, tag=1, gc=False):
    """A slab that the front end must map; its file descriptor is sent with the message.

    Attributes:
        number: the slab's number in later messages.
    """

    number: int


class SharedSlabRemoved(msgspec.Struct, array_like=True, tag=2, gc=False):
    """The numbers of slabs that the front end must unmap, as no later message refers to them."""

    numbers: list[int]


class BodyIntoSlabRequest(msgspec.Struct, array_like=True, tag=3, gc=False):
    """Instructs the front end to receive a body of announced length into a range of a shared slab.

    Attributes:
        number: the request's number.
        slab_number: the slab's number.
        offset, nbytes: the range in the slab, in bytes.
    """

    number: int
    slab_number: int
    offset: int
    nbytes: int


class BodyPartRequest(msgspec.Struct, array_like=True, tag=4, gc=False):
    """Instructs the front end to send a body in pieces, either only the next one or all."""

    number: int
    all: bool


class BodyStopRequest(msgspec.Struct, array_like=True, tag=5, gc=False):
    """Instructs the front end to stop receiving a body.

    If the body is received into a slab, the front end then sends `BodyAborted`, unless it has sent
    `BodyReceived` before.
    """

    number: int


class SharedSlabRange(msgspec.Struct, array_like=True, gc=False):
    """A range of bytes in a shared slab.

    Attributes:
        slab_number: the slab's number.
        offset, nbytes: the range in the slab, in bytes.
    """

    slab_number: int
    offset: int
    nbytes: int


class CompleteResponse(msgspec.Struct, array_like=True, tag=6, gc=False):
    """A complete response, whose body is in pieces: short ones as bytes, long ones as ranges of slabs.

    Attributes:
        nbytes: the length of the body in bytes.
    """

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: list[bytes | SharedSlabRange]
    nbytes: int


class ResponsePart(msgspec.Struct, array_like=True, tag=7, gc=False):
    """A piece of a response that the application sends in several ASGI messages.

    The first piece has the status and the headers; later ones have the status 0.

    Attributes:
        more: whether more pieces follow.
    """

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    data: bytes
    more: bool


class ResponseAborted(msgspec.Struct, array_like=True, tag=8, gc=False):
    """A report that a response stays incomplete, because the application ended without completing it."""

    number: int


class OperationResponse(msgspec.Struct, array_like=True, tag=9, gc=False):
    """A complete response with the result of an operation, for which the front end makes the headers.

    Attributes:
        measured: measurements for the headers.
        cors_headers: CORS headers for the web page that sent the request.
        body: the body in pieces, as in `CompleteResponse`.
    """

    number: int
    media_type: str
    measured: LaunchMeasurements
    cors_headers: Sequence[tuple[bytes, bytes]]
    body: list[bytes | SharedSlabRange]

    def make_response(self, request_id: str) -> CompleteResponse:
        """Make the headers, and return the response to the request with this id."""
        nbytes = sum([each.nbytes if isinstance(each, SharedSlabRange) else len(each) for each in self.body])
        headers = [
            *make_response_headers(nbytes, self.media_type.encode(), self.measured.make_headers()),
            *self.cors_headers,
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
