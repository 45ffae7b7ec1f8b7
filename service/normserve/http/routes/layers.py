"""`/v1/layers`: parameters that are stored on the server under a name."""

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from normserve.codec.media_types import SAFETENSORS
from normserve.engine.engine import Engine
from normserve.errors import InvalidParameterError, MalformedPayloadError, UnsupportedMediaTypeError
from normserve.http.body import BodyReader
from normserve.http.curl import is_form
from normserve.http.exchange import Exchange
from normserve.http.routes.negotiation import declared_format, sniffed_format, with_hints
from normserve.layers.changes import LayerChanges
from normserve.layers.registry import LAYER_NAMES, LayerRegistry, is_layer_name
from normserve.requests.layers import layer_document, require_layer_query
from normserve.requests.parameters import (
    LAYER_PARAMETERS,
    describe,
)


@dataclass(frozen=True, slots=True)
class Layers:
    """The handlers of these routes."""

    engine: Engine
    layers: LayerRegistry
    changes: LayerChanges
    bodies: BodyReader

    def router(self) -> APIRouter:
        """The collection and its members."""
        router = APIRouter(prefix="/v1/layers", tags=["layers"])
        router.add_api_route("", self.list_all, methods=["GET", "HEAD"], name="layers")
        router.add_api_route("/{name}", self.show, methods=["GET", "HEAD"], name="layer")
        router.add_api_route("/{name}", self.remove, methods=["DELETE"], status_code=204, name="remove layer")
        binary = {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}
        described = {
            "parameters": describe(LAYER_PARAMETERS),
            "requestBody": {"required": True, "content": binary},
        }
        router.add_api_route(
            "/{name}", self.register, methods=["PUT"], name="register layer", openapi_extra=described
        )
        return router

    async def list_all(self, request: Request) -> JSONResponse:
        """Every registered layer, by name."""
        _note(request)
        return JSONResponse({"layers": [layer_document(layer) for layer in self.layers.all()]})

    async def show(self, request: Request, name: str) -> JSONResponse:
        """One registered layer."""
        _note(request)
        return JSONResponse(layer_document(self.layers.get(name)))

    async def remove(self, request: Request, name: str) -> Response:
        """Remove a layer; requests that already use it are not affected."""
        _note(request)
        _exchange(request).begin_work()
        await self.changes.remove(name)
        return Response(status_code=204)

    async def register(self, request: Request, name: str) -> JSONResponse:
        """Store a weight, and optionally a bias, under a name."""
        _note(request)
        if not is_layer_name(name):
            raise InvalidParameterError(f"a layer's name must be {LAYER_NAMES}")
        query = request.scope["query_string"]
        require_layer_query(query)
        self.engine.require_ready()
        headers = request.headers
        content_type = headers.get("content-type", "")
        declared = declared_format(content_type, headers.get("content-encoding", ""))
        body = await self.bodies.read(_exchange(request))
        try:
            self._admit(request, declared or sniffed_format(body), len(body))
            _exchange(request).begin_work()
            layer, replaced = await self.changes.register(name, query, body)
        except (MalformedPayloadError, UnsupportedMediaTypeError) as error:
            raise with_hints(error, body, declared, is_form=is_form(content_type)) from None
        return JSONResponse(layer_document(layer), status_code=200 if replaced else 201)

    def _admit(self, request: Request, body_format: str, nbytes: int) -> None:
        if body_format != SAFETENSORS:
            raise UnsupportedMediaTypeError(f"a layer's parameters must be {SAFETENSORS}, got {body_format}")
        _exchange(request).charge_copy(nbytes)


def _exchange(request: Request) -> Exchange:
    exchange: Exchange = request.state.exchange
    return exchange


def _note(request: Request) -> None:
    _exchange(request).record.op = "layers"
