"""The content of an inference request: its JSON header, checked against the model before any tensor is read.

The fields of the header are validated strictly: unknown ones are refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from normserve.codec.api_names import OF_SAMPLES, PARAMETERS, STATISTICS
from normserve.codec.media_types import detect_binary_media_type, suggest_supported_format
from normserve.codec.shapes import count_bits_within_limits
from normserve.errors import (
    InvalidParameterError,
    InvalidShapeError,
    MalformedPayloadError,
    TooLargeError,
    UnexpectedTensorError,
)
from normserve.errors.name_suggestions import suggest_name
from normserve.http.oip.datatypes import parse_datatype
from normserve.http.oip.models import VERSION, InferenceModel
from normserve.jobs.job import LAYER_OPTIONS, OUT_DTYPE_OF_FLOATS, NormSpec, Op, PassDirection
from normserve.jobs.validation import list_accepted_tensor_names
from normserve.memory.tensors import DType
from normserve.requests.request_parameters import (
    Parameters,
    find_layer_name,
    list_operation_parameters,
    make_spec,
    parse_parameters,
)

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

_MAX_TIMEOUT_US = 86_400_000_000
_RESERVED = "triton_"
_ABSENT = (b"", b"null")

_MARK = "\ufeff".encode()


class InputParameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The location of an input's bytes, unless its values are in the JSON."""

    binary_data_size: Size | None = None
    shared_memory_region: str | None = None
    shared_memory_byte_size: Size | None = None
    shared_memory_offset: Size | None = None


class InputHeader(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The JSON description of one input tensor, with its values if these are in the JSON, too."""

    name: str
    shape: tuple[Size, ...]
    datatype: str
    parameters: InputParameters | None = None
    data: msgspec.Raw = _NO_DATA


class OutputParameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The requested location of an output: the JSON, the binary data after it, or a shared memory region."""

    binary_data: bool | None = None
    classification: int = 0
    shared_memory_region: str | None = None
    shared_memory_byte_size: Size | None = None
    shared_memory_offset: Size | None = None


class OutputHeader(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The JSON description of one requested output tensor."""

    name: str
    parameters: OutputParameters | None = None


class InferenceHeader(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The JSON header of an inference request: the complete request without its binary data.

    Attributes:
        model_name, model_version: the values in the path, which some clients repeat here.
    """

    inputs: tuple[InputHeader, ...]
    id: str | None = None
    model_name: str | None = None
    model_version: str | None = None
    parameters: dict[str, Value] | None = None
    outputs: tuple[OutputHeader, ...] | None = None


_DECODER = msgspec.json.Decoder(InferenceHeader)


def parse_json_length(header_value: bytes | None, body_bytes: int | None) -> int | None:
    """Parse the header field with the number of bytes of JSON in a body.

    Return None if the field is absent: the complete body is JSON.

    Args:
        header_value: the value of the header field `LENGTH`, None if it is absent.
        body_bytes: the body's length, None if it is unknown.

    Raises:
        MalformedPayloadError: the value is not a length, or longer than the body.
        TooLargeError: the JSON is too long.
    """
    if header_value is None:
        require_json_limit(body_bytes or 0)
        return None
    if not header_value.isdigit() or len(header_value) > _MAX_DIGITS:
        raise MalformedPayloadError("Inference-Header-Content-Length must be a number of bytes")
    nbytes = int(header_value)
    if body_bytes is not None and nbytes > body_bytes:
        raise MalformedPayloadError(
            f"Inference-Header-Content-Length must be at most the body's {body_bytes} bytes, is {nbytes}"
        )
    require_json_limit(nbytes)
    return nbytes


def require_json_limit(nbytes: int) -> None:
    """Require that a request's JSON of `nbytes` is not longer than `MAX_JSON_BYTES`.

    Raises:
        TooLargeError: the JSON is longer.
    """
    if nbytes > MAX_JSON_BYTES:
        raise TooLargeError(
            f"a request's JSON must be at most {MAX_JSON_BYTES} bytes, got {nbytes}: send tensors as binary data"
        )


def parse_header(text: bytes | memoryview) -> InferenceHeader:
    """Parse the JSON header of an inference request, in which unknown fields are refused.

    Raises:
        MalformedPayloadError: the JSON has another form or too many fields, or two tensors have the
            same name.
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
        found_format = _describe_other_format(text)
        # Binary tensors behind the JSON, without the header that says where it ends.
        is_followed = "trailing characters" in reason
        hint = "; if tensors follow it, Inference-Header-Content-Length must be its bytes" if is_followed else ""
        raise MalformedPayloadError(f"the request's JSON cannot be read: {found_format}{reason}{hint}") from None
    _require_valid_names("inputs", [each.name for each in header.inputs])
    _require_valid_names("outputs", [each.name for each in header.outputs or ()])
    return header


def _describe_other_format(text: bytes | memoryview) -> str:
    """Return the part of an error about JSON that cannot be read which names the format that its first bytes show;
    "" if they show none, or JSON.
    """
    if bytes(text[:1]) in (b"{", b"["):
        return ""
    media_type = detect_binary_media_type(text)
    found_format = f"{media_type}, which /v1 takes" if media_type else suggest_supported_format(text)
    return f"its first bytes show {found_format}; " if found_format else ""


def strip_byte_order_mark(text: bytes | memoryview) -> bytes | memoryview:
    """Return JSON without the byte order mark that programs on Windows write before it."""
    return text[len(_MARK) :] if text[: len(_MARK)] == _MARK else text


def _make_format_error(reason: str) -> MalformedPayloadError | InvalidParameterError:
    """Turn the JSON decoder's message about a refused header into an error.

    For an unknown field, the error names the most similar known field.
    """
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


def _require_valid_names(what: str, names: list[str]) -> None:
    """Refuse more than `MAX_TENSORS` tensors, or two with the same name.

    Args: what: "inputs" or "outputs", for the error's message.

    Raises:
        TooLargeError: there are too many tensors.
        MalformedPayloadError: two have the same name.
    """
    if len(names) > MAX_TENSORS:
        raise TooLargeError(f"a request must have at most {MAX_TENSORS} {what}, got {len(names)}")
    if len(set(names)) != len(names):
        raise MalformedPayloadError(f"each of the {what} must have a name of its own")


@dataclass(frozen=True, slots=True)
class JsonSource:
    """The source of an input tensor whose values are in the JSON header."""

    json: msgspec.Raw


@dataclass(frozen=True, slots=True)
class BinarySource:
    """The source of an input tensor whose bytes are in the body, from offset `start` on.

    Their number follows from the tensor's shape and dtype.
    """

    start: int


@dataclass(frozen=True, slots=True)
class RegionReference:
    """A byte range of a registered memory region, which an input is read from or an output is written to.

    Attributes:
        name: the region's name.
        offset: offset of the range in the region, in bytes.
    """

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One input tensor.

    Attributes:
        nbytes: number of bytes for its shape and dtype.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    source: JsonSource | BinarySource | RegionReference


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """One requested output tensor, and the form in which it is returned.

    Attributes:
        is_binary: whether it is sent as binary data after the JSON, not in the JSON.
        region: the memory region that it is written to; None if it is sent.
    """

    name: str
    is_binary: bool
    region: RegionReference | None = None


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A checked inference request: its options and descriptions of its tensors, without their data.

    Attributes:
        layer: name of the layer whose parameters are used.
        outputs: None if all are requested.
        is_binary_default: whether outputs are sent as binary by default.
        timeout_ms: None for the server's default.
        uses_regions: whether a tensor is read from or written to a region.
    """

    spec: NormSpec
    layer: str | None
    inputs: tuple[InputTensor, ...]
    outputs: tuple[RequestedOutput, ...] | None
    is_binary_default: bool
    timeout_ms: float | None
    id: str | None
    uses_regions: bool = False


def make_checked_request(
    model: InferenceModel, header: InferenceHeader, json_bytes: int, body_bytes: int
) -> InferenceRequest:
    """Check the fields of a parsed header against the model; return the request that they describe.

    Args: body_bytes: length of the JSON and all binary data after it.

    Raises:
        NormserveError: the header is invalid.
    """
    if header.model_name not in (None, model.name) or header.model_version not in (None, "", VERSION):
        raise MalformedPayloadError("model_name and model_version must be those of the path, or absent")
    given = dict(header.parameters or {})
    all_binary = _pop_flag(given, "binary_data_output")
    timeout_ms = _pop_timeout_us_as_ms(given)
    values = _parse_parameters(model, given)
    outputs = (
        None if not header.outputs else tuple([_check_output(model, each, all_binary) for each in header.outputs])
    )
    if (
        outputs is not None
        and model.direction is PassDirection.FORWARD
        and any(each.name in STATISTICS for each in outputs)
    ):
        values["stats"] = True
    spec = _make_spec(model, values)
    inputs = _check_inputs(header.inputs, json_bytes, body_bytes)
    uses_regions = any(type(each.source) is RegionReference for each in inputs) or any(
        each.region for each in outputs or ()
    )
    return InferenceRequest(
        spec, _find_layer_name(model, values), inputs, outputs, all_binary, timeout_ms, header.id, uses_regions
    )


def make_raw_request(model: InferenceModel, row_shape: tuple[int, ...] | None, body_bytes: int) -> InferenceRequest:
    """Make the request for a body without JSON, whose bytes are the float32 values of x.

    For a layer, x has as many rows as fit; for an operation, x is a single row.

    Args: row_shape: the shape of one row of a layer's x, [N], or [H, N] with heads; None for an operation.

    Raises:
        NormserveError: the model needs more than x, or the bytes are not such an x.
    """
    if model.direction is PassDirection.BACKWARD or model.op is Op.GROUP_NORM:
        raise MalformedPayloadError(
            f"{model.name} cannot know the shapes of a body without a JSON header; Inference-Header-Content-Length"
            " must be that of one"
        )
    count, rest = divmod(body_bytes, DType.FLOAT32.itemsize)
    of_row = max(1, count) if row_shape is None else prod(row_shape)
    if rest or count % of_row:
        sizes = ", ".join(map(str, row_shape or (of_row,)))
        raise InvalidShapeError(
            f"without a JSON header a body must be FP32 [rows, {sizes}], got {body_bytes} bytes"
        )
    shape = (count,) if row_shape is None else (count // of_row, *row_shape)
    x = InputTensor("x", DType.FLOAT32, shape, body_bytes, BinarySource(0))
    return InferenceRequest(_make_spec(model, {}), _find_layer_name(model, {}), (x,), None, True, None, None)


def list_input_names(model: InferenceModel) -> tuple[str, ...]:
    """List the input names of a model."""
    return list_accepted_tensor_names(model.op, model.direction, parameters_in_layer=model.is_layer)


def list_output_names(model: InferenceModel) -> tuple[str, ...]:
    """List the names of a model's possible outputs, in the order of responses."""
    if model.direction is PassDirection.BACKWARD:
        of_input = [f"d{name}" for name in (*PARAMETERS, *OF_SAMPLES) if name in list_input_names(model)]
        return ("dx", *of_input) if model.op is Op.GROUP_NORM else ("dx", "dresidual", *of_input)
    if model.op is Op.LAYER_NORM_CHAIN:
        return ("y",)
    return ("y", "residual_out", *(STATISTICS[1:] if model.op is Op.RMS_NORM else STATISTICS))


def _find_layer_name(model: InferenceModel, values: dict[str, Any]) -> str | None:
    return model.name if model.is_layer else find_layer_name(values)


def _make_spec(model: InferenceModel, values: dict[str, Any]) -> NormSpec:
    """Make the spec without the values that a layer fixes, which are added when the job is made."""
    layer = {"layer": model.name} if model.is_layer else {}
    return make_spec(model.op, model.direction, values | layer)


def _pop_flag(given: dict[str, Value], name: str) -> bool:
    """Remove a flag from `given` and return it; return False if it is absent.

    Raises:
        InvalidParameterError: the value is neither true nor false.
    """
    value = given.pop(name, False)
    if not isinstance(value, bool):
        raise InvalidParameterError(f"{name} must be true or false")
    return value


def _pop_timeout_us_as_ms(given: dict[str, Value]) -> float | None:
    """Remove `timeout`, in microseconds, from `given`; return it in milliseconds.

    Return None for the server's default, if the timeout is absent or 0.

    Raises:
        InvalidParameterError: the value is not an integer from 0 to a day.
    """
    value = given.pop("timeout", 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_TIMEOUT_US:
        raise InvalidParameterError("timeout must be a whole number of microseconds, a day at most")
    return value / 1000 or None


def _parse_parameters(model: InferenceModel, given: dict[str, Value]) -> dict[str, Any]:
    """Parse a request's parameters like the query parameters of `/v1`.

    Raises:
        MalformedPayloadError: a parameter's name is reserved.
        InvalidParameterError: a parameter is unknown or has an invalid value.
    """
    accepted = _list_request_parameters(model)
    for name in given:
        if name.startswith(_RESERVED):
            raise MalformedPayloadError(f"{name[:64]!r} is reserved: no parameter may begin with {_RESERVED}")
        if name not in accepted:
            near = suggest_name(name, [*accepted, "timeout", "binary_data_output"])
            raise InvalidParameterError(f"{name[:64]!r} is not a parameter of {model.name}; {near}")
    return parse_parameters([(name, _format_query_value(value)) for name, value in given.items()], accepted)


def _list_request_parameters(model: InferenceModel) -> Parameters:
    """List the parameters that requests to a model may have: those of its operation.

    For a layer, the options that the layer fixes are left out.  The timeout is parsed separately.
    """
    of_layer = {"layer", *[option.name for option in LAYER_OPTIONS]} if model.is_layer else set()
    # The protocol has no datatype of eight bits.
    changed = {"out_dtype": OUT_DTYPE_OF_FLOATS}
    of_operation = list_operation_parameters(model.op, model.direction)
    return {
        name: changed.get(name, each)
        for name, each in of_operation.items()
        if name not in {"timeout_ms", *of_layer}
    }


def _format_query_value(value: Value) -> str:
    """Format a JSON parameter as text for the parser of query parameters."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def _check_output(model: InferenceModel, header: OutputHeader, all_binary: bool) -> RequestedOutput:
    """Check one requested output against the model; return the form in which it is to be returned.

    If x is sent as several tensors, an output's name may have a number, for example `y.0`.

    Args: all_binary: whether an output is binary if it does not specify that.

    Raises:
        NormserveError: the name is not that of an output, or the parameters are invalid.
    """
    output_names = list_output_names(model)
    base, _, number = header.name.partition(".")
    if header.name not in output_names and not (base in output_names and number.isdigit()):
        near = suggest_name(header.name, output_names)
        raise UnexpectedTensorError(f"{header.name[:64]!r} is not an output of {model.name}; {near}")
    parameters = header.parameters or OutputParameters()
    if parameters.classification:
        raise InvalidParameterError("classification is not supported: outputs are tensors")
    is_binary = all_binary if parameters.binary_data is None else parameters.binary_data
    region = _parse_region_reference(header.name, parameters)
    if region is not None and is_binary and parameters.binary_data:
        raise MalformedPayloadError(f"{header.name} must be requested as binary data or in a region, not both")
    return RequestedOutput(header.name, is_binary, region)


def _check_inputs(headers: Iterable[InputHeader], json_bytes: int, body_bytes: int) -> tuple[InputTensor, ...]:
    """Check the inputs in order; return them with the location of each one's data.

    Binary inputs must follow the JSON one after another, up to the end of the body.

    Args:
        json_bytes: length of the JSON.
        body_bytes: length of the complete body.

    Raises:
        NormserveError: an input is invalid, or the body has another length.
    """
    inputs = []
    position = json_bytes
    for header in headers:
        dtype = parse_datatype(header.name, header.datatype)
        nbytes = count_bits_within_limits(header.shape, dtype.itemsize * 8) // 8
        parameters = header.parameters or InputParameters()
        region = _parse_region_reference(header.name, parameters)
        data = None if bytes(header.data) in _ABSENT else header.data
        if (data is not None) + (parameters.binary_data_size is not None) + (region is not None) != 1:
            raise MalformedPayloadError(
                f"{header.name[:64]!r} must have exactly one of data, binary_data_size and shared_memory_region"
            )
        source: JsonSource | BinarySource | RegionReference
        if data is not None:
            source = JsonSource(data)
        else:
            size = parameters.binary_data_size if region is None else region.nbytes
            if size != nbytes:
                raise MalformedPayloadError(
                    f"{header.name[:64]!r} must have the {nbytes} bytes of its shape and datatype, got {size}"
                )
            source = region or BinarySource(position)
            position += 0 if region else nbytes
        inputs.append(InputTensor(header.name, dtype, header.shape, nbytes, source))
    if position != body_bytes:
        raise MalformedPayloadError(
            f"the JSON and the binary inputs must be the whole body of {body_bytes} bytes, are {position}"
        )
    return tuple(inputs)


def _parse_region_reference(name: str, parameters: InputParameters | OutputParameters) -> RegionReference | None:
    """Return the region range that a tensor's parameters name; None if they name no region.

    Raises:
        MalformedPayloadError: some of the parameters for a region are missing.
    """
    if parameters.shared_memory_region is None:
        if parameters.shared_memory_byte_size is not None or parameters.shared_memory_offset is not None:
            raise MalformedPayloadError(f"{name[:64]!r} must name the shared_memory_region of its size and offset")
        return None
    if parameters.shared_memory_byte_size is None:
        raise MalformedPayloadError(f"{name[:64]!r} must have a shared_memory_byte_size beside its region")
    return RegionReference(
        parameters.shared_memory_region, parameters.shared_memory_offset or 0, parameters.shared_memory_byte_size
    )
