"""Protobuf's wire format, as far as large tensors need it: they stay where they lie in a message's bytes.

Each access to a `bytes` field of a generated class copies it, and so does parsing.
"""

from collections.abc import Iterator, Sequence

from normserve.grpc.statuses import CallError, Code

RAW_INPUT_FIELD, RAW_OUTPUT_FIELD = 7, 6
"""The numbers of `raw_input_contents` in a request and of `raw_output_contents` in a response."""

# A request has at most 64 inputs and 64 outputs; what else it has are parameters.
_MAX_FIELDS = 1024

# Of a request without its raw tensors, whose parsing delays all clients: the limit of JSON in HTTP.
_MAX_HEAD_BYTES = 4 * 2**20

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


def split_request(message: bytes) -> tuple[bytes, list[memoryview]]:
    """Split the bytes of a ModelInferRequest into those without raw tensors, and views of the raw tensors.

    Raises:
        CallError: the bytes are no message, or have too many fields or too many bytes beside the raw tensors.
    """
    view = memoryview(message)
    heads: list[memoryview] = []
    tensors: list[memoryview] = []
    head_begin = 0
    for number, begin, content, end in _scan_fields(view):
        if number == RAW_INPUT_FIELD:
            heads.append(view[head_begin:begin])
            tensors.append(view[content:end])
            head_begin = end
    heads.append(view[head_begin:])
    head_bytes = sum(map(len, heads))
    if head_bytes > _MAX_HEAD_BYTES:
        raise CallError(
            Code.RESOURCE_EXHAUSTED,
            f"a request without raw_input_contents must be at most {_MAX_HEAD_BYTES} bytes, got {head_bytes}: send"
            " tensors in raw_input_contents",
        )
    return b"".join(heads), tensors


def join_response(head: bytes, tensors: Sequence[bytes | memoryview]) -> bytes:
    """Join a serialised ModelInferResponse without raw tensors and the raw tensors, with one copy of each byte."""
    parts: list[bytes | memoryview] = [head]
    for tensor in tensors:
        parts.append(encode_key(RAW_OUTPUT_FIELD, len(tensor)))
        parts.append(tensor)
    return b"".join(parts)


def encode_key(number: int, nbytes: int) -> bytes:
    """Encode what precedes the content of a field of bytes, a text or a message: its number and length."""
    return _encode_varint(number << 3 | _DELIMITED) + _encode_varint(nbytes)


def _scan_fields(view: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """List the fields of a message: the number, and where the key, the content and the end are.

    Raises:
        CallError: the bytes are no message, or have too many fields.
    """
    position, size, count = 0, len(view), 0
    while position < size:
        begin = position
        key, position = _read_varint(view, position)
        kind = key & 7
        if kind == _DELIMITED:
            nbytes, content = _read_varint(view, position)
            position = content + nbytes
        elif kind == _VARINT:
            content = position
            _, position = _read_varint(view, position)
        elif kind in (_FIXED32, _FIXED64):
            content = position
            position += 4 if kind == _FIXED32 else 8
        else:
            raise _make_malformed_error()
        count += 1
        if position > size or not key >> 3:
            raise _make_malformed_error()
        if count > _MAX_FIELDS:
            raise CallError(Code.INVALID_ARGUMENT, f"a request must have at most {_MAX_FIELDS} fields")
        yield key >> 3, begin, content, position


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    """Read an integer of variable length; return it and where it ends."""
    value = 0
    for place, byte in enumerate(view[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, position + place + 1
    raise _make_malformed_error()


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _make_malformed_error() -> CallError:
    return CallError(Code.INVALID_ARGUMENT, "the bytes of the request are not a protobuf message")
