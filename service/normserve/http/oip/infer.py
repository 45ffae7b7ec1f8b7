"""`POST /v2/models/{model}/infer`."""

import functools
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
from normserve.http.oip.asked import Asked, check_header, check_raw
from normserve.http.oip.header import LENGTH, json_bytes, read_header, require_short
from normserve.http.oip.models import Model, Models
from normserve.http.oip.notes import TRANSPORT
from normserve.http.oip.shared_memory import TRANSPORT_CUDA, TRANSPORT_SYSTEM
from normserve.http.oip.shared_tensors import NONE, SharedTensors, placed
from normserve.http.oip.sources import brought_bytes, tensors_of
from normserve.http.oip.statistics import Statistics
from normserve.http.responses import BuffersResponse
from normserve.jobs.validation import costed_job
from normserve.layers.registry import LayerRegistry
from normserve.requests.several import joined

# Longer headers are not cached.
_LONGEST_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Infer:
    """Handles inference requests."""

    bodies: BodyReader
    models: Models
    layers: LayerRegistry
    statistics: Statistics
    shared: SharedTensors

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
            asked = _read(model, None if layer is None else layer.row, of_json, body)
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
        job, cost = costed_job(asked.spec, tensors, layer, may_overwrite=not body.readonly)
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


def _read(model: Model, row: tuple[int, ...] | None, of_json: int | None, body: memoryview) -> Asked:
    """The request in a body, checked against the model."""
    if of_json == 0:
        return check_raw(model, row, len(body))
    if of_json is None:
        of_json = len(body)
        require_short(of_json)
        return check_header(model, read_header(body), of_json, len(body))
    if of_json > len(body):
        raise MalformedPayloadError(f"the JSON must end within the body of {len(body)} bytes, ends at {of_json}")
    if of_json > _LONGEST_KEPT:
        return check_header(model, read_header(body[:of_json]), of_json, len(body))
    return _known(model, bytes(body[:of_json]), of_json, len(body))


@functools.lru_cache(maxsize=1024)
def _known(model: Model, text: bytes, of_json: int, body_bytes: int) -> Asked:
    """Cached, because clients send the same few headers repeatedly."""
    return check_header(model, read_header(text), of_json, body_bytes)
