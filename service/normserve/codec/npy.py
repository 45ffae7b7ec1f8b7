"""npy, versions 1.0 to 3.0: a magic, a header that is a Python literal, then the bytes of one array.

The header is read by a grammar that admits what numpy writes for a plain array and nothing else; it is never
evaluated.  Sizes are checked against the body before anything is made from them.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

import functools
import re
from dataclasses import dataclass
from typing import NamedTuple

from normserve.codec.media_types import NPY_MAGIC
from normserve.codec.shapes import count_bits_within_limits
from normserve.errors import MalformedPayloadError, NotAcceptableError, UnsupportedDtypeError
from normserve.memory.tensors import DType, HostTensor

_DTYPES = {"f4": DType.FLOAT32, "f2": DType.FLOAT16}
_DESCRS = {dtype: f"<{element}" for element, dtype in _DTYPES.items()}
# Little-endian, or the order of this machine, which is the same.
_NATIVE = re.compile(r"[<=|]?(f[0-9])")

# Kinds of plain elements and the sizes in bytes of each; None where any size is valid.
_ELEMENT_SIZES = {
    "b": (1,),
    "i": (1, 2, 4, 8),
    "u": (1, 2, 4, 8),
    "f": (2, 4, 8, 12, 16),
    "c": (8, 16, 24, 32),
    "m": (8,),
    "M": (8,),
    "S": None,
    "U": None,
}
_DESCR = re.compile(r"[<>|=]?(?P<kind>[a-zA-Z])(?P<size>[0-9]{1,9})(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?")

# Python's literals know more white space than numpy writes, and str.strip() more than they.
_SPACE = " \t\r\n"
_ITEM = re.compile(
    r"""(?:'(?P<key>\w{1,32})'|"(?P<key2>\w{1,32})")[ \t\r\n]*:[ \t\r\n]*
        (?:'(?P<text>[^'\\\n]*)'|"(?P<text2>[^"\\\n]*)"|(?P<flag>True|False)|\((?P<sizes>[0-9, \t\r\n]*)\))
        [ \t\r\n]*(?:,[ \t\r\n]*|\Z)""",
    re.ASCII | re.VERBOSE,
)
# Python 2 wrote some sizes as 4L; numpy reads them in the versions of that time.
_LONG = re.compile(r"(?<=[0-9])L(?=[ ,)])")
_SIZE = re.compile("0|[1-9][0-9]{0,18}")

# Version to the width of its length field and its header's encoding.
_VERSIONS = {(1, 0): (2, "latin-1"), (2, 0): (4, "latin-1"), (3, 0): (4, "utf-8")}
_VERSION_END = len(NPY_MAGIC) + 2
_MAX_HEADER_BYTES = 64 * 1024

#: The data in the output of `encode` begin at a multiple of so many bytes.
DATA_ALIGNMENT = 64


class _NpyHeader(NamedTuple):
    """The three fields of an npy header.  Their types have been checked, but not yet whether the values are
    supported.
    """

    descr: str
    fortran_order: bool
    shape: tuple[int, ...]


class _ArrayDescription(NamedTuple):
    """The array that a header describes; dtype is None if this API does not support its elements."""

    dtype: DType | None
    descr: str
    fortran_order: bool
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class NpyEntry:
    """The validated description of the array in an npy body.

    Attributes:
        start: offset of the data, which end where the body does.
    """

    dtype: DType
    shape: tuple[int, ...]
    fortran_order: bool
    start: int

    def view_tensor(self, body: memoryview) -> HostTensor:
        """Return the array as a view of its body, or of another body with an identical header."""
        return HostTensor(self.dtype, self.shape, body[self.start :], self.fortran_order)


def decode(body: memoryview) -> HostTensor:
    """Return the array in `body` as a view."""
    return read_entry(body).view_tensor(body)


def read_entry(body: memoryview) -> NpyEntry:
    """Validate the header of `body` and return the array's description.

    Args:
        body: the complete payload, a flat view of bytes.

    Raises:
        MalformedPayloadError: the bytes are no well-formed npy of plain elements, or fewer or more than the
            shape asks for.
        UnsupportedDtypeError: all is well-formed, but the elements are not little-endian float32 or float16.
    """
    start, stop, encoding = _find_header(body)
    array = _parse_description(bytes(body[start:stop]), encoding)
    nbytes = len(body) - stop
    if nbytes != array.nbytes:
        raise MalformedPayloadError(f"the shape asks for {array.nbytes} bytes of data, got {nbytes}")
    if array.dtype is None:
        raise UnsupportedDtypeError(
            f"an npy array must be little-endian float32 or float16, '<f4' or '<f2', got {array.descr!r};"
            " x.astype('<f4') converts it"
        )
    return NpyEntry(array.dtype, array.shape, array.fortran_order, stop)


def _find_header(body: memoryview) -> tuple[int, int, str]:
    """Find the header's text: return the offsets of its start and stop, and its encoding.

    Raises:
        MalformedPayloadError: the magic, the version or the header's length is not valid.
    """
    if body[: len(NPY_MAGIC)] != NPY_MAGIC or len(body) < _VERSION_END:
        raise MalformedPayloadError("npy must begin with its magic and a version")
    version = (body[_VERSION_END - 2], body[_VERSION_END - 1])
    if version not in _VERSIONS:
        raise MalformedPayloadError(f"the npy version must be 1.0, 2.0 or 3.0, got {version[0]}.{version[1]}")
    length_bytes, encoding = _VERSIONS[version]
    start = _VERSION_END + length_bytes
    if len(body) < start:
        raise MalformedPayloadError(f"npy must begin with {start} bytes up to its header, got {len(body)}")
    length = int.from_bytes(body[_VERSION_END:start], "little")
    room = min(_MAX_HEADER_BYTES, len(body) - start)
    if length > room:
        raise MalformedPayloadError(f"the header must be at most {room} bytes here, got {length}")
    return start, start + length, encoding


def _parse_description(text: bytes, encoding: str) -> _ArrayDescription:
    """Parse a header's text, and return the description of its array, with the size in bytes.

    Raises:
        MalformedPayloadError: the header is not one of a plain array.
    """
    try:
        decoded = text.decode(encoding)
    except UnicodeDecodeError as error:
        raise MalformedPayloadError(f"the header must be UTF-8, byte {error.start} is not") from None
    if encoding == "latin-1":
        decoded = _LONG.sub("", decoded)
    descr, fortran_order, shape = _parse_fields(decoded)
    nbytes = count_bits_within_limits(shape, 8 * _parse_element_bytes(descr)) // 8
    # With fewer than two dimensions the orders are one.
    native = _NATIVE.fullmatch(descr)
    dtype = None if native is None else _DTYPES.get(native[1])
    return _ArrayDescription(dtype, descr, fortran_order and len(shape) > 1, shape, nbytes)


def _parse_fields(text: str) -> _NpyHeader:
    """Parse a header's text, and check that it has exactly the three fields with their types.

    Raises:
        MalformedPayloadError: it is not such a header.
    """
    items = _parse_dictionary(text)
    if items.keys() != {"descr", "fortran_order", "shape"}:
        raise MalformedPayloadError("the header must have exactly descr, fortran_order and shape")
    descr, fortran_order, shape = items["descr"], items["fortran_order"], items["shape"]
    if not isinstance(descr, str):
        raise MalformedPayloadError("descr must be a string: structured arrays are not accepted")
    if not isinstance(fortran_order, bool):
        raise MalformedPayloadError("fortran_order must be True or False")
    if not isinstance(shape, tuple):
        raise MalformedPayloadError("shape must be a tuple of whole numbers")
    return _NpyHeader(descr, fortran_order, shape)


def _parse_dictionary(text: str) -> dict[str, str | bool | tuple[int, ...]]:
    """Parse `{'key': value, ...}`, in which a value is a string, a truth value or a tuple of whole numbers."""
    items: dict[str, str | bool | tuple[int, ...]] = {}
    # The format pads with blanks and ends with one newline; numpy reads no other line.
    literal = text.removesuffix("\n").strip(" \t")
    if len(literal) < 2 or literal[0] != "{" or literal[-1] != "}":
        raise MalformedPayloadError("the header must be a dictionary")
    body = literal[1:-1].strip(_SPACE)
    position = 0
    while position < len(body):
        match = _ITEM.match(body, position)
        if match is None:
            raise MalformedPayloadError(
                "the header must map names to a string, a truth value or a tuple of whole numbers"
            )
        key = match["key"] or match["key2"]
        if key in items:
            raise MalformedPayloadError("the header repeats a key")
        items[key] = _parse_value(match)
        position = match.end()
    return items


def _parse_value(match: re.Match[str]) -> str | bool | tuple[int, ...]:
    """Convert a value that was matched in the header to a truth value, a tuple of whole numbers or a string."""
    if match["flag"] is not None:
        return match["flag"] == "True"
    if match["sizes"] is not None:
        return _parse_sizes(match["sizes"])
    return match["text"] if match["text"] is not None else match["text2"]


def _parse_sizes(text: str) -> tuple[int, ...]:
    """Parse the text between the parentheses of a shape; as in Python, one size needs a comma: (3,)."""
    if not text.strip(_SPACE):
        return ()
    *sizes, last = (size.strip(_SPACE) for size in text.split(","))
    if last:
        sizes.append(last)
    if "," not in text or not all(_SIZE.fullmatch(size) for size in sizes):
        raise MalformedPayloadError("shape must be a tuple of whole numbers")
    return tuple(int(size) for size in sizes)


def _parse_element_bytes(descr: str) -> int:
    """Return the size of an element in bytes, by numpy's name of its type, such as '<f4'.

    Raises:
        MalformedPayloadError: there is no such type, or its elements are not plain numbers or strings.
    """
    match = _DESCR.fullmatch(descr)
    if descr.lstrip("<>|=")[:1] == "O":
        raise MalformedPayloadError("arrays of Python objects are not accepted")
    if descr.lstrip("<>|=")[:1] == "V":
        raise MalformedPayloadError("arrays of raw bytes are not accepted; send bfloat16 as safetensors")
    if match is None or match["kind"] not in _ELEMENT_SIZES:
        raise MalformedPayloadError("descr must name a byte order, a kind and a size, such as '<f4'")
    size, allowed = int(match["size"]), _ELEMENT_SIZES[match["kind"]]
    if allowed is not None and size not in allowed:
        raise MalformedPayloadError(f"there are no elements of kind {match['kind']} with {size} bytes")
    return size * 4 if match["kind"] == "U" else size


def encode(tensor: HostTensor) -> list[bytes | memoryview]:
    """Encode a tensor in pieces: an npy 1.0 header padded to `DATA_ALIGNMENT`, then the tensor's own buffer.

    Raises:
        NotAcceptableError: the tensor is bfloat16 or float8, which npy cannot express.
        ValueError: the buffer is of another size than shape and dtype ask for.
    """
    if tensor.dtype not in _DESCRS:
        raise NotAcceptableError(
            f"npy has no {tensor.dtype.value}: accept safetensors, or ask for out_dtype float32 or float16"
        )
    if tensor.data.nbytes != tensor.nbytes:
        raise ValueError(f"the tensor must have {tensor.nbytes} bytes, got {tensor.data.nbytes}")
    return [_encode_header(_DESCRS[tensor.dtype], tensor.fortran_order, tensor.shape), tensor.data]


@functools.lru_cache(maxsize=1024)
def _encode_header(descr: str, fortran_order: bool, shape: tuple[int, ...]) -> bytes:
    """Encode all bytes that precede the data: magic, version 1.0, the header's length and its padded text."""
    header = repr({"descr": descr, "fortran_order": fortran_order, "shape": shape})
    unpadded = _VERSION_END + 2 + len(header) + 1
    text = (header + " " * (-unpadded % DATA_ALIGNMENT) + "\n").encode("latin-1")
    return NPY_MAGIC + bytes((1, 0)) + len(text).to_bytes(2, "little") + text
