"""The JSON header of an inference request, with strict validation of its fields.

The meaning of the tensors is checked in `asked`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from normserve.errors import InvalidParameterError, MalformedPayloadError, TooLargeError
from normserve.requests.request_parameters import suggest_name

LENGTH = b"inference-header-content-length"
"""The header field with the number of bytes of JSON in the body."""

MAX_JSON_BYTES = 4 * 2**20
"""Limit of a request's JSON, whose parsing delays all clients; larger tensors must be sent as binary data."""

MAX_TENSORS = 64
"""Limit of the inputs, and of the outputs, of one request."""

# Limit of colons, which are counted before decoding: the most tensors that are allowed need less than a third.
_MAX_FIELDS = 4096
_MAX_DIGITS = 18

Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Value = bool | int | float | str | None


_NO_DATA = msgspec.Raw(b"")


class InputParameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The location of an input's bytes, if they are not in the JSON."""

    binary_data_size: Size | None = None
    shared_memory_region: str | None = None
    shared_memory_byte_size: Size | None = None
    shared_memory_offset: Size | None = None


class InputHeader(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One input."""

    name: str
    shape: tuple[Size, ...]
    datatype: str
    parameters: InputParameters | None = None
    data: msgspec.Raw = _NO_DATA


class OutputParameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The requested location of an output's bytes."""

    binary_data: bool | None = None
    classification: int = 0
    shared_memory_region: str | None = None
    shared_memory_byte_size: Size | None = None
    shared_memory_offset: Size | None = None


class OutputHeader(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One requested output."""

    name: str
    parameters: OutputParameters | None = None


class InferenceHeader(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A complete request without its binary data.

    Attributes:
        model_name, model_version: some clients repeat here the values of the path.
    """

    inputs: tuple[InputHeader, ...]
    id: str | None = None
    model_name: str | None = None
    model_version: str | None = None
    parameters: dict[str, Value] | None = None
    outputs: tuple[OutputHeader, ...] | None = None


_MARK = "\ufeff".encode()
_DECODER = msgspec.json.Decoder(InferenceHeader)


def parse_json_length(header_value: bytes | None, announced: int | None) -> int | None:
    """Parse the number of bytes of JSON in a body from its header; return None if the complete body is JSON.

    Args:
        header_value: the value of the header field `LENGTH`, None if it is absent.
        announced: the body's length, None if it is unknown.

    Raises:
        MalformedPayloadError: the value is not a length, or longer than the body.
        TooLargeError: the JSON is too long.
    """
    if header_value is None:
        require_json_limit(announced or 0)
        return None
    if not header_value.isdigit() or len(header_value) > _MAX_DIGITS:
        raise MalformedPayloadError("Inference-Header-Content-Length must be a number of bytes")
    nbytes = int(header_value)
    if announced is not None and nbytes > announced:
        raise MalformedPayloadError(
            f"Inference-Header-Content-Length must be at most the body's {announced} bytes, is {nbytes}"
        )
    require_json_limit(nbytes)
    return nbytes


def require_json_limit(nbytes: int) -> None:
    """Raises: TooLargeError: the JSON is too long."""
    if nbytes > MAX_JSON_BYTES:
        raise TooLargeError(
            f"a request's JSON must be at most {MAX_JSON_BYTES} bytes, got {nbytes}: send tensors as binary data"
        )


def parse_header(text: bytes | memoryview) -> InferenceHeader:
    """Parse the JSON header.

    Raises:
        MalformedPayloadError: the JSON has another form or too many fields, or two tensors have the same name.
        InvalidParameterError: a tensor has an unknown parameter.
        TooLargeError: there are too many tensors.
    """
    fields = bytes(text).count(b":")
    if fields > _MAX_FIELDS:
        raise MalformedPayloadError(f"a request's JSON must have at most {_MAX_FIELDS} fields, got {fields}")
    try:
        header = _DECODER.decode(strip_byte_order_mark(text))
    except msgspec.ValidationError as error:
        raise _make_format_error(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise MalformedPayloadError(f"the request's JSON cannot be read: {reason}") from None
    _require_distinct_names("inputs", [each.name for each in header.inputs])
    _require_distinct_names("outputs", [each.name for each in header.outputs or ()])
    return header


def strip_byte_order_mark(text: bytes | memoryview) -> bytes | memoryview:
    """Return JSON without the byte order mark that programs on Windows write before it."""
    return text[len(_MARK) :] if text[: len(_MARK)] == _MARK else text


def _make_format_error(reason: str) -> MalformedPayloadError | InvalidParameterError:
    """Make the error for JSON of another form; for an unknown field, its message has the closest known one."""
    _, unknown, rest = reason.partition("unknown field `")
    where = reason.rpartition(" - at `")[2].rstrip("`") if " - at `" in reason else "$"
    if not unknown:
        return MalformedPayloadError(f"the request's JSON is not valid: {reason[:300]}")
    name = rest.partition("`")[0]
    of_input, of_output = where.startswith("$.inputs"), where.startswith("$.outputs")
    if where.endswith(".parameters") and where != "$.parameters":
        near = suggest_name(name, (InputParameters if of_input else OutputParameters).__struct_fields__)
        return InvalidParameterError(f"{name[:64]!r} is not a parameter of a tensor; {near}")
    header_type = InputHeader if of_input else OutputHeader if of_output else InferenceHeader
    near = suggest_name(name, header_type.__struct_fields__)
    return MalformedPayloadError(f"{name[:64]!r} is not a known field; {near}")


def _require_distinct_names(what: str, names: list[str]) -> None:
    if len(names) > MAX_TENSORS:
        raise TooLargeError(f"a request must have at most {MAX_TENSORS} {what}, got {len(names)}")
    if len(set(names)) != len(names):
        raise MalformedPayloadError(f"each of the {what} must have a name of its own")
