"""safetensors: 8 bytes of header length, a JSON header, then the tensors' bytes without a hole.

A header is checked completely against the body before anything is allocated from it.  A tensor's data
are a view of the body; nothing is copied, and nothing is allocated in proportion to sizes in the header.

Source: https://github.com/huggingface/safetensors (format section of its README).
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from normserve.codec import strict_json
from normserve.codec.shapes import count_bits_within_limits
from normserve.errors import MalformedPayloadError, TooLargeError, UnsupportedDtypeError
from normserve.memory.tensors import DType, HostTensor

_DTYPES = {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}
_RESULT_DTYPES = _DTYPES | {"F8_E4M3": DType.FLOAT8_E4M3FN}
_DTYPE_NAMES = {dtype: name for name, dtype in _RESULT_DTYPES.items()}

# Bits of an element, for every dtype that the format defines: a size is checked even where it is of no use.
_ELEMENT_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8"), 8),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
# Names that a later version of the format may define: unsupported, but not malformed.
_FUTURE_DTYPE = re.compile(r"(?:I|U|F|BF|C)[0-9]{1,3}(?:_[A-Z0-9]{1,12})?")

_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_LENGTH_BYTES = 8
_HEADER_DEPTH = 3
_SAFE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

#: The data in the output of `encode` begin at a multiple of so many bytes.
DATA_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class HeaderLimits:
    """Limits on the size of a header, so that a malicious one costs little time."""

    max_header_bytes: int
    max_tensors: int


REQUEST_LIMITS = HeaderLimits(max_header_bytes=64 * 1024, max_tensors=64)
#: For files that the operator names: as much as the usual library accepts.
CHECKPOINT_LIMITS = HeaderLimits(max_header_bytes=100_000_000, max_tensors=1_000_000)


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """The validated description of one tensor in a body.

    Attributes:
        name: as in the header.
        dtype: the format's name of the element type, one that we compute in or not.
        shape: sizes, outermost first.
        start, stop: the tensor's bytes, counted from the first byte of the body.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def view_tensor(self, body: memoryview) -> HostTensor:
        """Return the tensor as a view of its body.

        Raises:
            UnsupportedDtypeError: the element type is not float32, float16 or bfloat16.
        """
        return self._view_as(_DTYPES, body)

    def view_result(self, body: memoryview) -> HostTensor:
        """Return the tensor as a view of a response's body.  Unlike a request's tensors, it may be float8_e4m3fn.

        Raises:
            UnsupportedDtypeError: the element type is not float32, float16, bfloat16 or float8_e4m3fn.
        """
        return self._view_as(_RESULT_DTYPES, body)

    def _view_as(self, dtypes: Mapping[str, DType], body: memoryview) -> HostTensor:
        """Return the tensor as a view of its body, with the element type from `dtypes`.

        Args:
            dtypes: the accepted element types, by the format's names.

        Raises:
            UnsupportedDtypeError: the tensor has another element type.
        """
        dtype = dtypes.get(self.dtype)
        if dtype is None:
            raise UnsupportedDtypeError(
                f"{_format_label(self.name)} must be one of {', '.join(dtypes)}, got {self.dtype};"
                " x.astype('<f4') of numpy or x.float() of torch converts it"
            )
        return HostTensor(dtype, self.shape, body[self.start : self.stop])


def decode(body: memoryview, limits: HeaderLimits = REQUEST_LIMITS) -> dict[str, HostTensor]:
    """Return all tensors in `body` by name, in the header's order.

    Args:
        body: the complete payload, a flat view of bytes; the tensors are views of the body.
        limits: the limits of the header.

    Raises:
        MalformedPayloadError: the bytes are no well-formed safetensors.
        TooLargeError: there are more tensors than `limits` allows.
        UnsupportedDtypeError: all is well-formed, but an element type is not float32, float16 or bfloat16.
    """
    return {entry.name: entry.view_tensor(body) for entry in read_entries(body, limits)}


def read_entries(body: memoryview, limits: HeaderLimits = REQUEST_LIMITS) -> Sequence[SafetensorsEntry]:
    """Validate the header of `body` and return the description of each tensor, of any element type.

    Raises:
        MalformedPayloadError: the bytes are no well-formed safetensors.
        TooLargeError: there are more tensors than `limits` allows.
    """
    text = bytes(body[_LENGTH_BYTES : _find_header_end(body, limits)])
    header = _parse_header(text)
    _check_metadata(header.pop(_METADATA, {}))
    if len(header) > limits.max_tensors:
        raise TooLargeError(f"a payload must hold at most {limits.max_tensors} tensors, got {len(header)}")
    data_start = _LENGTH_BYTES + len(text)
    entries = tuple([_parse_entry(name, fields, data_start) for name, fields in header.items()])
    _check_contiguity(entries, data_start, len(body))
    return entries


def _find_header_end(body: memoryview, limits: HeaderLimits) -> int:
    """Return the offset at which the JSON header ends and the tensors' data begin.

    Raises:
        MalformedPayloadError: the header is longer than the limit or the body.
    """
    if len(body) < _LENGTH_BYTES:
        raise MalformedPayloadError(
            f"safetensors must begin with {_LENGTH_BYTES} bytes of header length, got {len(body)} bytes"
        )
    length = int.from_bytes(body[:_LENGTH_BYTES], "little")
    if length > limits.max_header_bytes:
        raise MalformedPayloadError(f"the header must be at most {limits.max_header_bytes} bytes, got {length}")
    end = _LENGTH_BYTES + length
    if end > len(body):
        raise MalformedPayloadError(f"the header must end within the body of {len(body)} bytes, ends at {end}")
    return end


def _parse_header(raw: bytes) -> dict[str, object]:
    """Parse the JSON header: the fields of each tensor by name, and the metadata.

    Raises:
        MalformedPayloadError: it is not UTF-8, or not such JSON.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise MalformedPayloadError(f"the header must be UTF-8, byte {error.start} is not") from None
    return strict_json.parse_object(text, _HEADER_DEPTH)


def _check_metadata(metadata: object) -> None:
    """Raise MalformedPayloadError unless the header's metadata is null or maps strings to strings."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MalformedPayloadError(f"{_METADATA} must map strings to strings")


def _parse_entry(name: str, fields: object, data_start: int) -> SafetensorsEntry:
    """Check the fields of one tensor in the header, and return its description with offsets in the body.

    Raises:
        MalformedPayloadError: a field is missing or not valid, or its size does not follow from its shape.
    """
    # Other fields are ignored, as the format's own library ignores them.
    if not isinstance(fields, dict) or not fields.keys() >= _FIELDS:
        raise MalformedPayloadError(f"{_format_label(name)} must have dtype, shape and data_offsets")
    dtype, shape = fields["dtype"], fields["shape"]
    if not isinstance(dtype, str) or not (dtype in _ELEMENT_BITS or _FUTURE_DTYPE.fullmatch(dtype)):
        raise MalformedPayloadError(f"{_format_label(name)} has a dtype that safetensors does not define")
    if not _is_size_list(shape):
        raise MalformedPayloadError(f"{_format_label(name)} must have a shape of whole numbers")
    begin, end = _parse_offsets(name, fields["data_offsets"])
    element_bits = _ELEMENT_BITS.get(dtype)
    bits = count_bits_within_limits(shape, element_bits or 1)
    if element_bits is not None and bits != 8 * (end - begin):
        raise MalformedPayloadError(
            f"{_format_label(name)} must have the {bits / 8:g} bytes that its shape asks for, got {end - begin}"
        )
    return SafetensorsEntry(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _parse_offsets(name: str, offsets: object) -> tuple[int, int]:
    if not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise MalformedPayloadError(f"{_format_label(name)} must have data_offsets [begin, end] with begin <= end")
    return offsets[0], offsets[1]


def _is_size_list(value: object) -> TypeGuard[list[int]]:
    # `type is`, because a JSON true is an int to isinstance.
    return isinstance(value, list) and all(type(size) is int for size in value)


def _check_contiguity(entries: Sequence[SafetensorsEntry], data_start: int, body_bytes: int) -> None:
    """Raise MalformedPayloadError unless the tensors fill the body's data without a hole or an overlap."""
    position = data_start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != position:
            fault = "leaves a hole before" if entry.start > position else "overlaps"
            raise MalformedPayloadError(f"the data {fault} {_format_label(entry.name)}")
        position = entry.stop
    if position != body_bytes:
        raise MalformedPayloadError(
            f"the tensors must end where the body does, at byte {body_bytes}, but end at {position}"
        )


def _format_label(name: str) -> str:
    """Return a tensor's name for a message, replaced if it is long or has unusual characters."""
    return f"tensor {name!r}" if _SAFE_NAME.fullmatch(name) else "a tensor of unprintable name"


def sort_by_element_size(tensors: Mapping[str, tuple[DType, Sequence[int]]]) -> list[str]:
    """Return the tensors' names in the order of their data in the body: those with the largest elements come first.

    Tensors of equal element size stay in the given order.  So every tensor starts at a multiple of
    its element size, which readers that reinterpret the buffer rely on.
    """
    return sorted(tensors, key=lambda name: -tensors[name][0].itemsize)


def encode_header(tensors: Mapping[str, tuple[DType, Sequence[int]]]) -> bytes:
    """Encode all bytes that precede the data: length, JSON, and spaces up to `DATA_ALIGNMENT`.

    The caller sends these, then the tensors' buffers in `sort_by_element_size(tensors)`, with nothing between.
    """
    names = sort_by_element_size(tensors)
    if _METADATA in names:
        raise ValueError(f"no tensor can be called {_METADATA}")
    return _encode_header(tuple([(name, tensors[name][0], tuple(tensors[name][1])) for name in names]))


@functools.lru_cache(maxsize=1024)
def _encode_header(described: tuple[tuple[str, DType, tuple[int, ...]], ...]) -> bytes:
    """Encode the header of tensors, given by name, dtype and shape in the order of their data."""
    header: dict[str, Any] = {}
    position = 0
    for name, dtype, shape in described:
        end = position + count_bits_within_limits(shape, dtype.itemsize * 8) // 8
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % DATA_ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def encode(tensors: Mapping[str, HostTensor]) -> list[bytes | memoryview]:
    """Encode tensors as a list of pieces: the header, then each tensor's own buffer, sorted by element size.

    Raises:
        ValueError: a tensor is in column-major order, which safetensors cannot express, or its buffer is of
            another size than its shape and dtype ask for.
    """
    for name, tensor in tensors.items():
        if tensor.fortran_order:
            raise ValueError(f"{name} must be row-major")
        if tensor.data.nbytes != tensor.nbytes:
            raise ValueError(f"{name} must have {tensor.nbytes} bytes, got {tensor.data.nbytes}")
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return [encode_header(described), *(tensors[name].data for name in sort_by_element_size(described))]
