"""`POST /v1/{op}` and `POST /v1/{op}/backward`, with caches of parsed requests.

A request's head and its payload's header are parsed and checked once for identical requests.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fastapi import APIRouter, Request

from normserve.codec import npy, safetensors
from normserve.codec.media_types import NPY, SAFETENSORS
from normserve.errors import MalformedPayloadError, NotAcceptableError, UnsupportedMediaTypeError
from normserve.http.body_reader import BodyReader
from normserve.http.curl import is_form_type
from normserve.http.direct_routes import DirectRoute
from normserve.http.http_exchange import HttpExchange
from normserve.http.launch_measurements import LaunchMeasurements, record_result
from normserve.http.responses import BuffersResponse
from normserve.http.routes.api_descriptions import describe_tensors, make_command_line
from normserve.http.routes.format_negotiation import AcceptHeader, add_hints, detect_format, parse_declared_format
from normserve.http.transport import Buffers
from normserve.jobs.job import NormJob, NormResult, NormSpec, Op, PassDirection, RegisteredLayer
from normserve.jobs.memory_cost import MemoryCost
from normserve.jobs.validation import make_validated_job
from normserve.layers.registry import LayerRegistry
from normserve.memory.tensors import DType, HostTensor
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.numbered_tensors import TensorSplit, concatenate_tensors
from normserve.requests.prepared_calls import PreparedCallCache
from normserve.requests.request_lifecycle import RequestLifecycle
from normserve.requests.request_parameters import (
    find_layer_name,
    list_operation_parameters,
    make_openapi_parameters,
    make_spec,
    parse_query,
)

_NPY_START = b"\x93NUMPY\x01\x00"
_NPY_LENGTH_END, _SAFETENSORS_LENGTH_END = 10, 8

# Header fields that, besides the query, define the request.
_KEY_HEADERS = (b"content-type", b"content-encoding", b"accept")
# Bounds of a prepared head's memory: in all, and for each byte of its key.  An Accept header of short media ranges
# needs most.
_HEAD_BYTES, _BYTES_PER_HEAD_BYTE = 2**10, 48
# Bounds of a prepared payload's memory: in all, and for each byte of its header.
_PAYLOAD_BYTES, _BYTES_PER_PAYLOAD_BYTE = 2**10, 6


class PayloadTensor(Protocol):
    """A tensor that the header of a body describes, with a checked range of bytes in the body."""

    def view_tensor(self, body: memoryview) -> HostTensor:
        """Return the tensor as a view of the body."""


class ResponseFormat(NamedTuple):
    """The media type of a response, and how results are split into several tensors.

    Attributes:
        media_type: the media type of the response.
        tensor_split: how results are divided if x was sent as several tensors.
    """

    media_type: str
    tensor_split: TensorSplit | None


class PreparedPayload(NamedTuple):
    """The cached results of checking a request, for requests that differ only in their tensors' data."""

    tensors: Mapping[str, PayloadTensor]
    spec: NormSpec
    cost: MemoryCost
    response_format: ResponseFormat


@dataclass(frozen=True, slots=True)
class OperationRoutes:
    """The factory of the handlers and routes of all operations."""

    body_reader: BodyReader
    layers: LayerRegistry
    prepared_calls: PreparedCallCache

    def make_router(self) -> APIRouter:
        """Make the routes of all operations: one for each pass, forward or backward."""
        router = APIRouter(tags=["operations"], route_class=DirectRoute)
        for path, operation in self.make_endpoints().items():
            op, direction = operation.op, operation.direction
            router.add_api_route(
                path,
                operation.handle_request,
                methods=["POST"],
                name=f"{op.value} {direction.value}",
                summary=f"{op.value}, {direction.value}",
                description="Tensors in the body, everything else in the query. For example:\n\n"
                f"    {make_command_line(op, direction)}",
                openapi_extra=_describe_operation(op, direction)
                | {"x-codeSamples": _make_code_samples(op, direction)},
            )
        return router

    def make_endpoints(self) -> "dict[str, OperationEndpoint]":
        """Make the handlers of all operations: one for each pass, forward or backward, by path."""
        return {
            _make_path(op, direction): OperationEndpoint(
                self.body_reader, self.layers, self.prepared_calls, op, direction
            )
            for op in Op
            for direction in op.passes
        }


def _make_path(op: Op, direction: PassDirection) -> str:
    return f"/v1/{op.value}" + ("" if direction is PassDirection.FORWARD else "/backward")


@dataclass(frozen=True, slots=True)
class OperationEndpoint:
    """The handler of requests for the forward or backward pass of one operation.

    Attributes:
        prepared_calls: the cache of prepared heads and payloads.
    """

    body_reader: BodyReader
    layers: LayerRegistry
    prepared_calls: PreparedCallCache
    op: Op
    direction: PassDirection

    async def handle_request(self, request: Request) -> BuffersResponse:
        """Read the head, check what can be checked before the body, then receive, compute and answer."""
        exchange: HttpExchange = request.scope["state"]["exchange"]
        exchange.record.op, exchange.record.direction = self.op.label, self.direction.label
        head = self.prepare_head(
            request.scope["query_string"], exchange.headers, exchange.client_identity.tenant_name
        )
        layer = self.find_layer(head)
        body = await self.body_reader.receive_body_and_mark_in_progress(exchange)
        response_format = self.submit_operation(exchange, head, body, layer)
        result = await exchange.await_result()
        buffers, measured = build_response(exchange.record, response_format, result)
        return BuffersResponse(buffers, response_format.media_type.encode(), measured.make_headers())

    def find_layer(self, head: "OperationHead") -> RegisteredLayer | None:
        """Return the registered layer that a request's head names; None if it names none.

        Raises:
            UnknownLayerError: there is no layer of that name.
        """
        return None if head.layer is None else self.layers.resolve(self.op, head.layer)

    def prepare_head(self, query: bytes, headers: Mapping[bytes, bytes], tenant: str) -> "OperationHead":
        """Parse a request's query and headers, or return the cached result for identical ones.

        Each tenant has its own cached results.

        Raises:
            NormserveError: the head is invalid.
        """
        key_parts = [query, *[headers.get(name, b"") for name in _KEY_HEADERS]]
        key = (tenant, self.op, self.direction, *key_parts)
        head: OperationHead | None = self.prepared_calls.find(key)
        if head is None:
            head = _parse_head(self.op, self.direction, *key_parts)
            nbytes = _HEAD_BYTES + _BYTES_PER_HEAD_BYTE * sum(map(len, key_parts))
            self.prepared_calls.try_store(key, head, nbytes, tenant)
        return head

    def submit_operation(
        self, request: RequestLifecycle, head: "OperationHead", body: memoryview, layer: RegisteredLayer | None
    ) -> ResponseFormat:
        """Make and submit the job of a received body; return the format of the response.

        Raises:
            NormserveError: the body is invalid, takes too much memory, or its deadline has passed.
        """
        job, cost, response_format = self.make_job(head, body, layer, request)
        request.charge_memory(job, cost, len(body))
        request.submit_job(job, head.timeout_ms)
        return response_format

    def make_job(
        self, head: "OperationHead", body: memoryview, layer: RegisteredLayer | None, request: RequestLifecycle
    ) -> tuple[NormJob, MemoryCost, ResponseFormat]:
        """Make the job of a received body; return it with its memory cost and the format of the response.

        The results of parsing and checking are cached for requests that differ only in their tensors' data.

        Raises:
            NormserveError: the body is invalid, does not fit head and layer, or needs a copy that is refused.
        """
        header = get_cacheable_header(body)
        key = head, header, len(body)
        prepared: PreparedPayload | None = self.prepared_calls.find(key, layer) if header else None
        if prepared is None:
            entries, media_type = self._prepare_tensors_and_format(
                head, header, body, request.client_identity.tenant_name
            )
        else:
            entries, media_type = prepared.tensors, prepared.response_format.media_type
        decoded = {name: entry.view_tensor(body) for name, entry in entries.items()}
        tensors, several = concatenate_tensors(decoded, body, request.charge_body_copy)
        may_overwrite = not body.readonly
        if prepared is not None:
            return NormJob(prepared.spec, tensors, layer, may_overwrite), prepared.cost, prepared.response_format
        job, cost = make_validated_job(head.spec, tensors, layer, may_overwrite=may_overwrite)
        response_format = ResponseFormat(media_type, several)
        _require_expressible(response_format, job)
        if header:
            nbytes = _PAYLOAD_BYTES + _BYTES_PER_PAYLOAD_BYTE * len(header)
            value = PreparedPayload(entries, job.spec, cost, response_format)
            self.prepared_calls.try_store(key, value, nbytes, request.client_identity.tenant_name, layer)
        return job, cost, response_format

    def _prepare_tensors_and_format(
        self, head: "OperationHead", header: bytes, body: memoryview, tenant: str
    ) -> tuple[Mapping[str, PayloadTensor], str]:
        """Return the tensors that a body's header describes, and the media type of the response.

        The tensors are cached by body format, header and length.

        Args: header: the payload's header; empty if the tensors are not to be cached.

        Raises:
            NormserveError: the body is invalid, or the client accepts no format of the response.
        """
        key = tenant, head.body_format, header, len(body)
        entries: Mapping[str, PayloadTensor] | None = self.prepared_calls.find(key) if header else None
        try:
            body_format = head.body_format or detect_format(body)
            media_type = head.accept_header.choose_format(body_format)
            if entries is not None:
                return entries, media_type
            entries = parse_payload(body, body_format)
        except (MalformedPayloadError, UnsupportedMediaTypeError) as error:
            raise add_hints(error, body, head.body_format, is_form=head.is_form) from None
        if header:
            self.prepared_calls.try_store(
                key, entries, _PAYLOAD_BYTES + _BYTES_PER_PAYLOAD_BYTE * len(header), tenant
            )
        return entries, media_type


@dataclass(frozen=True, slots=True, eq=False)
class OperationHead:
    """The parsed and checked query and headers of a request; identical requests share the object.

    Heads are compared by identity, which is fast: they are keys of prepared payloads.

    Attributes:
        layer: the name of a registered layer, or for a chain the names, joined by commas; None without one.
        body_format: None if the body's first bytes decide.
        timeout_ms: None for the server's default.
        is_form: whether Content-Type is that of a form.
    """

    spec: NormSpec
    layer: str | None
    body_format: str | None
    accept_header: AcceptHeader
    timeout_ms: float | None
    is_form: bool


def _parse_head(
    op: Op, direction: PassDirection, query: bytes, content_type: bytes, content_encoding: bytes, accept: bytes
) -> OperationHead:
    """Parse and check the query and the headers that define a request.

    Raises:
        NormserveError: one of them is invalid.
    """
    values = parse_query(query, list_operation_parameters(op, direction))
    return OperationHead(
        spec=make_spec(op, direction, values),
        layer=find_layer_name(values),
        body_format=parse_declared_format(content_type.decode("latin-1"), content_encoding.decode("latin-1")),
        accept_header=AcceptHeader(accept.decode("latin-1")),
        timeout_ms=values.get("timeout_ms"),
        is_form=is_form_type(content_type.decode("latin-1")),
    )


def parse_payload(body: memoryview, body_format: str) -> Mapping[str, PayloadTensor]:
    """Parse the header of a body in npy or safetensors; return the tensors that it describes, by name.

    Raises:
        MalformedPayloadError, TooLargeError: as the formats' readers do.
    """
    if body_format == NPY:
        return {"x": npy.read_entry(body)}
    return {entry.name: entry for entry in safetensors.read_entries(body)}


def get_cacheable_header(body: memoryview) -> bytes:
    """Return the bytes of a body before its tensors' data, for use in a cache's key.

    Return empty bytes if the body is not to be cached: its header is too long, or it is in an unusual
    version of npy.
    """
    start = bytes(body[:_NPY_LENGTH_END])
    if start.startswith(_NPY_START):
        end = _NPY_LENGTH_END + int.from_bytes(start[_SAFETENSORS_LENGTH_END:], "little")
    else:
        end = _SAFETENSORS_LENGTH_END + int.from_bytes(start[:_SAFETENSORS_LENGTH_END], "little")
    longest = min(len(body), safetensors.REQUEST_LIMITS.max_header_bytes)
    return bytes(body[:end]) if end <= longest else b""


def _require_expressible(response_format: ResponseFormat, job: NormJob) -> None:
    """Before the computation, refuse a job if the response's format cannot represent the results that it asks for.

    Results that only follow from the tensors that were sent, such as residual_out and a parameter's gradient, are
    left out of npy, which has y or dx alone.

    Raises:
        NotAcceptableError: npy cannot represent several tensors, statistics beside y, or this dtype.
    """
    if response_format.media_type != NPY:
        return
    if response_format.tensor_split is not None:
        raise NotAcceptableError(f"npy holds one tensor: accept {SAFETENSORS}")
    if job.spec.stats:
        raise NotAcceptableError(
            f"npy holds y alone, and stats asks for more: accept {SAFETENSORS}, or leave out stats"
        )
    dtype = job.spec.out_dtype or job.x.dtype
    if dtype in (DType.BFLOAT16, DType.FLOAT8_E4M3FN):
        raise NotAcceptableError(
            f"npy has no {dtype.value}: accept {SAFETENSORS}, or ask for out_dtype float32 or float16"
        )


def build_response(
    record: RequestRecord, response_format: ResponseFormat, result: NormResult
) -> tuple[Buffers, LaunchMeasurements]:
    """Encode a result as the pieces of the response's body; return them with the measurements for the headers.

    The times of the result are written into the request's record.
    """
    began = time.perf_counter()
    if response_format.media_type == NPY:
        buffers = npy.encode(result.tensors["y" if "y" in result.tensors else "dx"])
    else:
        split = response_format.tensor_split
        tensors = result.tensors if split is None else split.split_results(result.tensors)
        buffers = safetensors.encode(tensors)
    return buffers, record_result(record, result, began)


def _make_code_samples(op: Op, direction: PassDirection) -> list[dict[str, str]]:
    lines = make_command_line(op, direction)
    return [{"lang": "Shell" if lines.startswith("curl") else "Python", "source": lines}]


def _describe_operation(op: Op, direction: PassDirection) -> dict[str, Any]:
    """Make the OpenAPI description of an operation's parameters, request body and response."""
    binary = {"schema": {"type": "string", "format": "binary"}}
    content = {SAFETENSORS: binary, NPY: binary}
    return {
        "parameters": make_openapi_parameters(list_operation_parameters(op, direction)),
        "requestBody": {"required": True, "description": describe_tensors(op, direction), "content": content},
        "responses": {"200": {"description": "The result.", "content": content}},
    }
