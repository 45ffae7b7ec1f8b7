"""The messages that a client on the same host and the server exchange; docs/local-protocol.md specifies them.

Each is the content of a frame (`framing`), in JSON.  They carry references to tensors, never the tensors.  The
content of a frame is untrusted: it is decoded from a copy that no other process can change, into types that
hold only their declared fields.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from normserve.codec.framing import PREFIX
from normserve.errors import MalformedPayloadError

VERSION = 1

#: Tensors and ranges begin at multiples of so many bytes of their segment.
ALIGNMENT = 16

#: Content of a frame that a client sends.
MAX_FRAME_BYTES = 64 * 1024

#: Messages that one frame may carry.
MAX_MESSAGES = 64

#: Tags are numbers of 32 bits.
TAGS = 2**32

_LONGEST_QUOTE = 200

Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Shape = Annotated[tuple[Whole, ...], msgspec.Meta(max_length=64)]


class TensorReference(msgspec.Struct, forbid_unknown_fields=True, frozen=True, gc=False):
    """A reference to a tensor in the memory that client and server share (the arena, made of segments).

    Attributes:
        segment: the number of a segment of this connection's arena.
        offset: of the tensor's first byte in the segment.
        dtype: "float32", "float16" or "bfloat16"; of a result "float8_e4m3fn" as well.
        shape: sizes, outermost first; elements are contiguous, row-major and little-endian.
    """

    segment: Whole
    offset: Whole
    dtype: Name
    shape: Shape


class SegmentRange(msgspec.Struct, forbid_unknown_fields=True, frozen=True, order=True, gc=False):
    """A range of bytes in a segment of the shared memory (the arena), such as the buffer for a result."""

    segment: Whole
    offset: Whole
    nbytes: Whole


class HelloMessage(msgspec.Struct, tag_field="do", tag="hello", forbid_unknown_fields=True, frozen=True):
    """The first message of a connection, with the version of the protocol and the API key.

    Attributes:
        version: of this protocol.
        key: an API key, where the server requires one.
    """

    version: Whole
    key: Text | None = None


class GrowArenaMessage(msgspec.Struct, tag_field="do", tag="grow", forbid_unknown_fields=True, frozen=True):
    """A request for another segment of shared memory (the arena), on the host or the device.

    The response carries the segment's file descriptor.
    """

    nbytes: Whole
    memory: Literal["host", "device"] = "host"


class FreeSegmentMessage(msgspec.Struct, tag_field="do", tag="free", forbid_unknown_fields=True, frozen=True):
    """A message that a segment of the shared memory is no longer used, so that the server may free it.

    There is no response.
    """

    segment: Whole


class CancelRequestMessage(msgspec.Struct, tag_field="do", tag="cancel", forbid_unknown_fields=True, frozen=True):
    """A message that cancels a queued request, given by its tag.

    The server responds to the cancelled request in any case, and to this message never.
    """

    request: Whole


class ComputeMessage(msgspec.Struct, tag_field="do", tag="compute", forbid_unknown_fields=True, frozen=True):
    """A request to compute one operation.

    Attributes:
        op: "layer_norm", "rms_norm" or "group_norm".
        direction: "forward" or "backward"; on the wire "pass".
        query: the parameters, as in the query of HTTP.
        tensors: by their names in the API.
        results: the range for each result, by its name in the API.
        traceparent: the caller's span, as in the header of HTTP.
    """

    op: Name
    tensors: dict[Name, TensorReference]
    results: dict[Name, SegmentRange]
    direction: Name = msgspec.field(name="pass", default="forward")
    query: Text = ""
    traceparent: Name | msgspec.UnsetType = msgspec.UNSET


class PutLayerMessage(msgspec.Struct, tag_field="do", tag="put_layer", forbid_unknown_fields=True, frozen=True):
    """A request to register a layer: the parameters of a norm, under a name.  The query is as in HTTP."""

    name: Name
    query: Text
    tensors: dict[Name, TensorReference]


class ListLayersMessage(msgspec.Struct, tag_field="do", tag="layers", forbid_unknown_fields=True, frozen=True):
    """A request for the list of registered layers."""


class GetLayerMessage(msgspec.Struct, tag_field="do", tag="layer", forbid_unknown_fields=True, frozen=True):
    """A request for one registered layer."""

    name: Name


class DeleteLayerMessage(
    msgspec.Struct, tag_field="do", tag="delete_layer", forbid_unknown_fields=True, frozen=True
):
    """A request to remove a registered layer."""

    name: Name


class GetInfoMessage(msgspec.Struct, tag_field="do", tag="info", forbid_unknown_fields=True, frozen=True):
    """A request for the server's versions, device and limits."""


Message = (
    HelloMessage
    | GrowArenaMessage
    | FreeSegmentMessage
    | CancelRequestMessage
    | ComputeMessage
    | PutLayerMessage
    | ListLayersMessage
    | GetLayerMessage
    | DeleteLayerMessage
    | GetInfoMessage
)


class LocalResponse(msgspec.Struct, omit_defaults=True):
    """The response to a message.

    Attributes:
        status: as in HTTP.
        request_id: names the request in the server's log.
        results: of an operation, by their names in the API.
        stages_ms: milliseconds in each of the server's stages.
        kernel_bytes, kernel_bandwidth, batch_size: as HTTP's headers.
        segment: the number of a new segment.
        device: of a segment in a device's memory, that device's UUID; "" is the host.
        nbytes: of such a segment.
        document: the result of a request other than an operation.
        problem: of an error, its problem document.
        retry_after_s: seconds after which the request may be repeated.
    """

    status: int
    request_id: str = ""
    results: dict[str, TensorReference] = {}
    stages_ms: dict[str, float] = {}
    kernel_bytes: Whole = 0
    kernel_bandwidth: float = 0.0
    batch_size: Whole = 1
    segment: Whole | None = None
    device: Name = ""
    nbytes: Whole = 0
    document: Any = None
    problem: dict[str, Any] = {}
    retry_after_s: Whole | None = None


class LazyLocalResponse(LocalResponse, omit_defaults=True):
    """A response as a client decodes it: a `LocalResponse` whose results stay encoded for `decode_results`.

    Attributes:
        results: the encoded results, for `decode_results`.
    """

    results: msgspec.Raw = msgspec.Raw(b"{}")  # type: ignore[assignment]


class StageMilliseconds(msgspec.Struct, gc=False):
    """The milliseconds that an operation spent in each stage of the server.  Only the server uses this class, to
    encode them.
    """

    recv: float
    queue: float
    copy_in: float
    kernel: float
    copy_out: float


class ComputeResponse(msgspec.Struct, gc=False):
    """The server's response to an operation.  Its `results` are encoded in JSON already.

    Clients decode it as a `LocalResponse`.
    """

    request_id: str
    results: msgspec.Raw
    stages_ms: StageMilliseconds
    kernel_bytes: int
    kernel_bandwidth: float
    batch_size: int
    status: int = 200


_messages = msgspec.json.Decoder(
    Message | Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
)
_answers = msgspec.json.Decoder(LocalResponse)
_replies = msgspec.json.Decoder(LazyLocalResponse)
_results = msgspec.json.Decoder(dict[str, TensorReference])
_encode = msgspec.json.Encoder().encode
_NOT_AS_DECLARED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_messages(content: bytes) -> Sequence[Message]:
    """Decode a client's frame to its messages: one, or an array of them.

    Raises:
        MalformedPayloadError: it holds anything else.
    """
    try:
        decoded = _messages.decode(content)
    except _NOT_AS_DECLARED as error:
        raise MalformedPayloadError(
            f"the frame is not a valid message: {_shorten_error_text(str(error))}"
        ) from None
    return decoded if isinstance(decoded, list) else (decoded,)


def decode_response(content: bytes) -> LocalResponse:
    """Decode a server's frame to its response.

    Raises:
        MalformedPayloadError: it holds anything else.
    """
    try:
        return _answers.decode(content)
    except _NOT_AS_DECLARED as error:
        raise _make_malformed_error(error) from None


def decode_lazy_response(content: bytes) -> LazyLocalResponse:
    """Decode a server's frame to its response; its results stay encoded, for `decode_results`.

    Raises:
        MalformedPayloadError: it holds anything else.
    """
    try:
        return _replies.decode(content)
    except _NOT_AS_DECLARED as error:
        raise _make_malformed_error(error) from None


def decode_results(answer: LocalResponse) -> dict[str, TensorReference]:
    """Return the decoded results of a response.

    Raises:
        MalformedPayloadError: they are anything else.
    """
    if not isinstance(answer, LazyLocalResponse):
        return answer.results
    try:
        return _results.decode(answer.results)
    except _NOT_AS_DECLARED as error:
        raise _make_malformed_error(error) from None


def _make_malformed_error(error: Exception) -> MalformedPayloadError:
    return MalformedPayloadError(f"the frame is not a valid answer: {_shorten_error_text(str(error))}")


def encode_frame(
    tag: int, message: Message | LocalResponse | ComputeResponse | msgspec.Raw | Sequence[Message]
) -> bytes:
    """Encode a frame: its prefix, and the message in JSON.  A `msgspec.Raw` is JSON already."""
    content = _encode(message)
    return PREFIX.pack(len(content), tag) + content


def _shorten_error_text(error_text: str) -> str:
    """Shorten a decoder's error message, which may quote its input, and replace unprintable characters."""
    printable = "".join(
        [each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in error_text[:_LONGEST_QUOTE]]
    )
    return printable + "…" if len(error_text) > _LONGEST_QUOTE else printable
