"""The messages that a client on the same host and the server exchange; docs/local-protocol.md specifies them.

Each is the content of a frame (`framing`), in JSON.  They carry references to tensors, never the tensors.  What a
frame says is data of the other side's choice: it is read from a copy that nobody else can change, into types that
hold nothing but what they declare.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from normserve.codec.framing import PREFIX
from normserve.errors import MalformedPayloadError

VERSION = 1

#: Tensors and places begin at multiples of so many bytes of their segment.
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
    """A tensor, and where it lies.

    Attributes:
        segment: the number of a segment of this connection's arena.
        offset: of the tensor's first byte in it.
        dtype: "float32", "float16" or "bfloat16"; of a result "float8_e4m3fn" as well.
        shape: sizes, outermost first; elements are contiguous, row-major and little-endian.
    """

    segment: Whole
    offset: Whole
    dtype: Name
    shape: Shape


class SegmentRange(msgspec.Struct, forbid_unknown_fields=True, frozen=True, order=True, gc=False):
    """Where a result is to be written, and how many bytes there are for it."""

    segment: Whole
    offset: Whole
    nbytes: Whole


class HelloMessage(msgspec.Struct, tag_field="do", tag="hello", forbid_unknown_fields=True, frozen=True):
    """The first message of a connection.

    Attributes:
        version: of this protocol.
        key: an API key, where the server asks for one.
    """

    version: Whole
    key: Text | None = None


class GrowArenaMessage(msgspec.Struct, tag_field="do", tag="grow", forbid_unknown_fields=True, frozen=True):
    """Asks for another segment of the arena, in the host's memory or the device's; its descriptor comes along."""

    nbytes: Whole
    memory: Literal["host", "device"] = "host"


class FreeSegmentMessage(msgspec.Struct, tag_field="do", tag="free", forbid_unknown_fields=True, frozen=True):
    """Gives a segment back, which the client does not use any more.  It has no answer."""

    segment: Whole


class CancelRequestMessage(msgspec.Struct, tag_field="do", tag="cancel", forbid_unknown_fields=True, frozen=True):
    """Takes back a request that still waits; that one has an answer in any case, this message none."""

    request: Whole


class ComputeMessage(msgspec.Struct, tag_field="do", tag="compute", forbid_unknown_fields=True, frozen=True):
    """One operation.

    Attributes:
        op: "layer_norm", "rms_norm" or "group_norm".
        direction: "forward" or "backward"; on the wire "pass".
        query: the parameters, as HTTP's query has them.
        tensors: by their names in the API.
        results: where each result goes, by its name in the API.
        traceparent: the span that it is sent in, as HTTP's header says it.
    """

    op: Name
    tensors: dict[Name, TensorReference]
    results: dict[Name, SegmentRange]
    direction: Name = msgspec.field(name="pass", default="forward")
    query: Text = ""
    traceparent: Name | msgspec.UnsetType = msgspec.UNSET


class PutLayerMessage(msgspec.Struct, tag_field="do", tag="put_layer", forbid_unknown_fields=True, frozen=True):
    """Registers parameters under a name; the query is HTTP's."""

    name: Name
    query: Text
    tensors: dict[Name, TensorReference]


class ListLayersMessage(msgspec.Struct, tag_field="do", tag="layers", forbid_unknown_fields=True, frozen=True):
    """Asks for the list of registered layers."""


class GetLayerMessage(msgspec.Struct, tag_field="do", tag="layer", forbid_unknown_fields=True, frozen=True):
    """Asks for one registered layer."""

    name: Name


class DeleteLayerMessage(
    msgspec.Struct, tag_field="do", tag="delete_layer", forbid_unknown_fields=True, frozen=True
):
    """Forgets a registered layer."""

    name: Name


class GetInfoMessage(msgspec.Struct, tag_field="do", tag="info", forbid_unknown_fields=True, frozen=True):
    """Asks what the server is."""


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
    """What a message is answered with.

    Attributes:
        status: as in HTTP.
        request_id: names the request in the server's log.
        results: of an operation, by their names in the API.
        stages_ms: milliseconds in each of the server's stages.
        kernel_bytes, kernel_bandwidth, batch_size: as HTTP's headers.
        segment: the number of a new segment.
        device: of a segment in a device's memory, that device's UUID; "" is the host.
        nbytes: of such a segment.
        document: what was asked for beside operations.
        problem: of an error, its problem document.
        retry_after_s: after how long the request may come again.
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
    """An `LocalResponse` as a client reads it.

    Attributes:
        results: encoded; `decode_results` reads them.
    """

    results: msgspec.Raw = msgspec.Raw(b"{}")  # type: ignore[assignment]


class StageMilliseconds(msgspec.Struct, gc=False):
    """Milliseconds in the stages of an operation, as the server writes them."""

    recv: float
    queue: float
    copy_in: float
    kernel: float
    copy_out: float


class ComputeResponse(msgspec.Struct, gc=False):
    """The answer to an operation as the server writes it: an `LocalResponse`, whose results are encoded already."""

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
    """The messages of a frame that a client sent: one, or an array of them.

    Raises:
        MalformedPayloadError: it holds anything else.
    """
    try:
        said = _messages.decode(content)
    except _NOT_AS_DECLARED as error:
        raise MalformedPayloadError(f"the frame is not a valid message: {_quote_printable(str(error))}") from None
    return said if isinstance(said, list) else (said,)


def decode_response(content: bytes) -> LocalResponse:
    """The answer that a frame of the server holds.

    Raises:
        MalformedPayloadError: it holds anything else.
    """
    try:
        return _answers.decode(content)
    except _NOT_AS_DECLARED as error:
        raise _make_malformed_error(error) from None


def decode_lazy_response(content: bytes) -> LazyLocalResponse:
    """As `decode_response`, but for the results."""
    try:
        return _replies.decode(content)
    except _NOT_AS_DECLARED as error:
        raise _make_malformed_error(error) from None


def decode_results(answer: LocalResponse) -> dict[str, TensorReference]:
    """The results of an answer, or of a reply.

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
    return MalformedPayloadError(f"the frame is not a valid answer: {_quote_printable(str(error))}")


def encode_frame(
    tag: int, message: Message | LocalResponse | ComputeResponse | msgspec.Raw | Sequence[Message]
) -> bytes:
    """A whole frame; of a `msgspec.Raw`, which is encoded already, as of anything else."""
    content = _encode(message)
    return PREFIX.pack(len(content), tag) + content


def _quote_printable(text: str) -> str:
    """Return a decoder's message, which may quote a few words of its input."""
    kept = "".join([each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[:_LONGEST_QUOTE]])
    return kept + "…" if len(text) > _LONGEST_QUOTE else kept
