"""`POST /v2/models/{model}/infer`, for tensors in the JSON, in the body or in regions of shared memory."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import APIRouter, Request

from normserve.codec import json_tensors
from normserve.errors import MalformedPayloadError, NormserveError
from normserve.http.body_reader import BodyReader, require_uncompressed
from normserve.http.curl import add_curl_hint, is_form_type
from normserve.http.direct_routes import DirectRoute
from normserve.http.http_exchange import HttpExchange
from normserve.http.launch_measurements import record_result
from normserve.http.oip.inference_request import (
    LENGTH,
    BinarySource,
    InferenceRequest,
    InputTensor,
    JsonSource,
    make_checked_request,
    make_raw_request,
    parse_header,
    parse_json_length,
    require_json_limit,
)
from normserve.http.oip.inference_response import build_response, require_expressible
from normserve.http.oip.inference_statistics import InferenceStatistics
from normserve.http.oip.metric_labels import label_transport
from normserve.http.oip.models import InferenceModel, ModelCatalogue
from normserve.http.oip.region_tensors import NONE, RegionTensorAccess, check_and_assign_result_buffers
from normserve.http.oip.shared_memory_routes import TRANSPORT_CUDA, TRANSPORT_SYSTEM
from normserve.http.responses import BuffersResponse
from normserve.layers.registry import LayerRegistry
from normserve.memory.device_segments import DeviceMemoryView
from normserve.memory.tensors import DeviceTensor, HostTensor
from normserve.requests.numbered_tensors import concatenate_tensors
from normserve.requests.prepared_calls import PreparedCallCache, prepare_job

# Of longer JSON most is data, which is not sent again.
_LONGEST_PREPARED = 4 * 2**10
# Bounds of a prepared call's memory: in all, and for each byte of its JSON.
_PREPARED_BYTES, _BYTES_PER_JSON_BYTE = 2**11, 10


@dataclass(frozen=True, slots=True)
class InferenceRoutes:
    """The handlers of inference requests, `POST /v2/models/{model}/infer`.

    Attributes:
        prepared_calls: the cache of parsed and checked JSON headers.
    """

    body_reader: BodyReader
    model_catalogue: ModelCatalogue
    layers: LayerRegistry
    statistics: InferenceStatistics
    region_tensors: RegionTensorAccess
    prepared_calls: PreparedCallCache

    def make_router(self) -> APIRouter:
        """Make the routes of inference, for paths with a model's version and without."""
        router = APIRouter(tags=["open inference protocol"], route_class=DirectRoute)
        for path in ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"):
            router.add_api_route(
                path,
                self.handle_request,
                methods=["POST"],
                summary="infer",
                description="A JSON header, and behind it the tensors that it describes.",
            )
        return router

    async def handle_request(self, request: Request) -> BuffersResponse:
        """Make the checks that need no body, then receive the body, compute and answer."""
        exchange: HttpExchange = request.scope["state"]["exchange"]
        label_transport(exchange.record)
        model = self.model_catalogue.find_model(**request.path_params)
        exchange.record.op, exchange.record.direction = model.op.label, model.direction.label
        try:
            return await self._run_inference(exchange, model)
        except NormserveError:
            self.statistics.count_failure(model.name, time.perf_counter() - exchange.record.began_at)
            raise

    async def _run_inference(self, exchange: HttpExchange, model: InferenceModel) -> BuffersResponse:
        """Receive the request's body, compute its results on the device, and build the response.

        Inputs may be in shared memory, and results may be written there.
        """
        require_uncompressed(exchange.headers.get(b"content-encoding", b"").decode("latin-1"))
        of_json = parse_json_length(exchange.headers.get(LENGTH), exchange.incoming_body.content_length)
        # A layer that is removed while the body arrives stays valid for this request.
        layer = self.layers.get(model.name) if model.is_layer else None
        body = await self.body_reader.receive_body_and_mark_in_progress(exchange)
        try:
            row = None if layer is None else layer.parameter_shape
            request = self._find_or_parse_request(model, row, of_json, body, exchange.client_identity.tenant_name)
        except MalformedPayloadError as error:
            # A body of JSON alone loses nothing that matters to `curl -d`.
            if of_json is None or not is_form_type(exchange.headers.get(b"content-type", b"").decode("latin-1")):
                raise
            raise add_curl_hint(error, body) from None
        if layer is None and request.layer is not None:
            layer = self.layers.resolve(model.op, request.layer)
        shared = NONE
        if request.uses_regions:
            exchange.record.transport = TRANSPORT_SYSTEM
            shared = self.region_tensors.bind_regions(exchange.client_identity, request)
            if shared.is_on_device:
                exchange.record.transport = TRANSPORT_CUDA
        brought = _count_external_bytes(request.inputs)
        if brought and exchange.permit is not None:
            self.body_reader.require_body_limit(len(body) + brought)
            exchange.permit.grow(brought)
        copies = await self.region_tensors.read_inputs(shared) if shared.inputs else {}
        tensors = _build_tensors(request.inputs, body, copies)
        tensors, several = (
            (tensors, None)
            if request.uses_regions
            else concatenate_tensors(tensors, body, exchange.charge_body_copy)
        )
        tenant, may_overwrite = exchange.client_identity.tenant_name, not body.readonly
        job, cost = prepare_job(
            self.prepared_calls, tenant, request.spec, tensors, layer, may_overwrite=may_overwrite
        )
        require_expressible(model, request, job, several)
        if shared.outputs:
            job = check_and_assign_result_buffers(shared, job)
        exchange.charge_memory(job, cost, len(body) + brought)
        exchange.submit_job(job, request.timeout_ms)
        result = await exchange.await_result()
        began = time.perf_counter()
        if shared.outputs:
            await self.region_tensors.write_outputs(shared, result.tensors)
        tensors = result.tensors if several is None else several.split_results(result.tensors)
        buffers, media_type, headers = build_response(model, request, tensors)
        headers = [*headers, *record_result(exchange.record, result, began).make_headers()]
        ended = time.perf_counter()
        self.statistics.count_success(model.name, result, ended - exchange.record.began_at, ended - began)
        return BuffersResponse(buffers, media_type, headers)

    def _find_or_parse_request(
        self,
        model: InferenceModel,
        row_shape: tuple[int, ...] | None,
        json_bytes: int | None,
        body: memoryview,
        tenant: str,
    ) -> InferenceRequest:
        """Return the checked request that a body contains, from the cache or by parsing the JSON.

        The request is taken from the cache if the same JSON was parsed before for this tenant, model and
        body length.  JSON that is long or contains tensor values is not cached.

        Args:
            row_shape: the shape of one row of a layer's x; None for an operation.
            json_bytes: number of bytes of JSON at the beginning of the body; None if the complete body is JSON.

        Raises:
            NormserveError: the JSON is invalid.
        """
        if json_bytes is not None and json_bytes > len(body):
            raise MalformedPayloadError(
                f"the JSON must end within the body of {len(body)} bytes, ends at {json_bytes}"
            )
        json = body if json_bytes is None else body[:json_bytes]
        if len(json) > _LONGEST_PREPARED:
            return _parse_inference_body(model, row_shape, json, json_bytes, len(body))
        key = tenant, model, row_shape, bytes(json), json_bytes, len(body)
        request: InferenceRequest | None = self.prepared_calls.find(key)
        if request is None:
            request = _parse_inference_body(model, row_shape, json, json_bytes, len(body))
            if not any(type(each.source) is JsonSource for each in request.inputs):
                self.prepared_calls.try_store(
                    key, request, _PREPARED_BYTES + _BYTES_PER_JSON_BYTE * len(json), tenant
                )
        return request


def _parse_inference_body(
    model: InferenceModel,
    row_shape: tuple[int, ...] | None,
    json: memoryview,
    json_bytes: int | None,
    body_bytes: int,
) -> InferenceRequest:
    """Parse the JSON of a body and check it against the model; without JSON, the body is the tensor x alone.

    Args:
        row_shape: the shape of one row of a layer's x; None for an operation.
        json: the JSON.
        json_bytes: number of bytes of JSON at the beginning of the body: 0 without JSON, None if the complete
            body is JSON.
        body_bytes: length of the complete body.
    """
    if json_bytes == 0:
        return make_raw_request(model, row_shape, body_bytes)
    require_json_limit(len(json))
    return make_checked_request(model, parse_header(json), len(json), body_bytes)


def _build_tensors(
    inputs: tuple[InputTensor, ...], body: memoryview, shared: Mapping[str, memoryview]
) -> Mapping[str, HostTensor]:
    """Build the input tensors, by name; those sent as binary data are views of the body.

    Args: shared: the bytes of tensors in shared memory, by name: copies, or a `DeviceMemoryView` of the
        region.

    Raises:
        NormserveError: a tensor is invalid.
    """
    return {each.name: _build_input_tensor(each, body, shared) for each in inputs}


def _build_input_tensor(each: InputTensor, body: memoryview, shared: Mapping[str, memoryview]) -> HostTensor:
    """Build one input tensor, from a range of the body, JSON values or shared memory."""
    match each.source:
        case BinarySource(start):
            return HostTensor(each.dtype, each.shape, body[start : start + each.nbytes])
        case JsonSource(json):
            return json_tensors.decode(each.name, each.dtype, each.shape, json)
        case _:
            data = shared[each.name]
            kind = DeviceTensor if isinstance(data, DeviceMemoryView) else HostTensor
            return kind(each.dtype, each.shape, data)


def _count_external_bytes(inputs: tuple[InputTensor, ...]) -> int:
    """Count the bytes of the tensors whose memory is not the body."""
    return sum([each.nbytes for each in inputs if type(each.source) is not BinarySource])
