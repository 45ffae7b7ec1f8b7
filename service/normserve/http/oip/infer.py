"""`POST /v2/models/{model}/infer`."""

import time
from dataclasses import dataclass

from fastapi import APIRouter, Request

from normserve.errors import MalformedPayloadError, NormserveError
from normserve.http.body import BodyReader, require_identity
from normserve.http.curl import is_form, with_curl_hint
from normserve.http.direct import DirectRoute
from normserve.http.exchange import Exchange
from normserve.http.measured import note_result
from normserve.http.oip.answer import answer, require_possible
from normserve.http.oip.asked import Asked, Data, check_header, check_raw
from normserve.http.oip.header import LENGTH, json_bytes, read_header, require_short
from normserve.http.oip.models import Model, Models
from normserve.http.oip.notes import TRANSPORT
from normserve.http.oip.shared_memory import TRANSPORT_CUDA, TRANSPORT_SYSTEM
from normserve.http.oip.shared_tensors import NONE, SharedTensors, placed
from normserve.http.oip.sources import brought_bytes, tensors_of
from normserve.http.oip.statistics import Statistics
from normserve.http.responses import BuffersResponse
from normserve.layers.registry import LayerRegistry
from normserve.requests.prepared_calls import PreparedCalls
from normserve.requests.prepared_jobs import prepare_job
from normserve.requests.several import joined

# Of longer JSON most is data, which is not sent again.
_LONGEST_PREPARED = 4 * 2**10
# A prepared call takes less than this, and for each byte of its JSON.
_PREPARED_BYTES, _BYTES_PER_JSON_BYTE = 2**11, 10


@dataclass(frozen=True, slots=True)
class Infer:
    """Handles inference requests.

    Attributes:
        prepared: JSON headers, and what they lead to.
    """

    bodies: BodyReader
    models: Models
    layers: LayerRegistry
    statistics: Statistics
    shared: SharedTensors
    prepared: PreparedCalls

    def router(self) -> APIRouter:
        """The two paths, with a version and without."""
        router = APIRouter(tags=["open inference protocol"], route_class=DirectRoute)
        for path in ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"):
            router.add_api_route(
                path,
                self.handle,
                methods=["POST"],
                summary="infer",
                description="A JSON header, and behind it the tensors that it describes.",
            )
        return router

    async def handle(self, request: Request) -> BuffersResponse:
        """Check what can be checked before the body, then receive, compute and answer."""
        exchange: Exchange = request.scope["state"]["exchange"]
        exchange.record.transport = TRANSPORT
        model = self.models.get(**request.path_params)
        exchange.record.op, exchange.record.direction = model.op.label, model.direction.label
        try:
            return await self._infer(exchange, model)
        except NormserveError:
            self.statistics.note_failure(model.name, time.perf_counter() - exchange.record.began)
            raise

    async def _infer(self, exchange: Exchange, model: Model) -> BuffersResponse:
        require_identity(exchange.headers.get(b"content-encoding", b"").decode("latin-1"))
        of_json = json_bytes(exchange.headers.get(LENGTH), exchange.reception.announced)
        # A layer that is removed while the body arrives stays valid for this request.
        layer = self.layers.get(model.name) if model.is_layer else None
        body = await self.bodies.receive(exchange)
        try:
            row = None if layer is None else layer.row
            asked = self._read(model, row, of_json, body, exchange.caller.tenant)
        except MalformedPayloadError as error:
            # A body of JSON alone loses nothing that matters to `curl -d`.
            if of_json is None or not is_form(exchange.headers.get(b"content-type", b"").decode("latin-1")):
                raise
            raise with_curl_hint(error, body) from None
        if layer is None and asked.layer is not None:
            layer = self.layers.named(model.op, asked.layer)
        shared = NONE
        if asked.uses_regions:
            exchange.record.transport = TRANSPORT_SYSTEM
            shared = self.shared.find(exchange.caller, asked)
            if shared.is_on_device:
                exchange.record.transport = TRANSPORT_CUDA
        brought = brought_bytes(asked.inputs)
        if brought and exchange.permit is not None:
            self.bodies.require_short(len(body) + brought)
            exchange.permit.grow(brought)
        copies = await self.shared.read(shared) if shared.inputs else {}
        tensors = tensors_of(asked.inputs, body, copies)
        tensors, several = (tensors, None) if asked.uses_regions else joined(tensors, body, exchange.charge_copy)
        tenant, may_overwrite = exchange.caller.tenant, not body.readonly
        job, cost = prepare_job(self.prepared, tenant, asked.spec, tensors, layer, may_overwrite=may_overwrite)
        require_possible(model, asked, job, several)
        if shared.outputs:
            job = placed(shared, job)
        exchange.charge_memory(job, cost, len(body) + brought)
        exchange.begin_job(job, asked.timeout_ms)
        result = await exchange.await_result()
        began = time.perf_counter()
        if shared.outputs:
            await self.shared.write(shared, result.tensors)
        tensors = result.tensors if several is None else several.divided(result.tensors)
        buffers, media_type, headers = answer(model, asked, tensors)
        headers = [*headers, *note_result(exchange.record, result, began).headers()]
        ended = time.perf_counter()
        self.statistics.note_success(model.name, result, ended - exchange.record.began, ended - began)
        return BuffersResponse(buffers, media_type, headers)

    def _read(
        self, model: Model, row: tuple[int, ...] | None, of_json: int | None, body: memoryview, tenant: str
    ) -> Asked:
        """Return the request in a body, checked against the model."""
        if of_json is not None and of_json > len(body):
            raise MalformedPayloadError(
                f"the JSON must end within the body of {len(body)} bytes, ends at {of_json}"
            )
        json = body if of_json is None else body[:of_json]
        if len(json) > _LONGEST_PREPARED:
            return _check(model, row, json, of_json, len(body))
        key = tenant, model, row, bytes(json), of_json, len(body)
        asked: Asked | None = self.prepared.find(key)
        if asked is None:
            asked = _check(model, row, json, of_json, len(body))
            if not any(type(each.source) is Data for each in asked.inputs):
                self.prepared.keep(key, asked, _PREPARED_BYTES + _BYTES_PER_JSON_BYTE * len(json), tenant)
        return asked


def _check(
    model: Model, row: tuple[int, ...] | None, json: memoryview, of_json: int | None, body_bytes: int
) -> Asked:
    if of_json == 0:
        return check_raw(model, row, body_bytes)
    require_short(len(json))
    return check_header(model, read_header(json), len(json), body_bytes)
