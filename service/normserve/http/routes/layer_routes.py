"""`/v1/layers`: parameters that are stored on the server under a name."""

import re
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from normserve.codec.media_types import SAFETENSORS
from normserve.engine.engine import Engine
from normserve.errors import InvalidParameterError, MalformedPayloadError, UnsupportedMediaTypeError
from normserve.http.body_reader import BodyReader
from normserve.http.curl import is_form_type
from normserve.http.http_exchange import HttpExchange
from normserve.http.routes.format_negotiation import add_hints, detect_format, parse_declared_format
from normserve.layers.layer_changes import LayerChanges
from normserve.layers.registry import LAYER_NAMES, LayerRegistry, is_layer_name
from normserve.requests.layer_requests import describe_layer, require_valid_layer_query
from normserve.requests.request_parameters import LAYER_PARAMETERS, make_openapi_parameters


class _SingleLayerRoute(APIRoute):
    """A route of one layer, whose name may be any text in the path: with slashes, with line ends, or empty.

    The handlers answer a name that no layer can have, as over shared memory.
    """

    def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.path_regex = re.compile(re.escape(path.removesuffix("{name}")) + r"(?P<name>.*)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """The handlers of `/v1/layers`, which list, show, register and remove layers."""

    engine: Engine
    layers: LayerRegistry
    layer_changes: LayerChanges
    body_reader: BodyReader

    def make_router(self) -> APIRouter:
        """Make the routes of all layers, `/v1/layers`, and of one layer, `/v1/layers/{name}`."""
        router = APIRouter(prefix="/v1/layers", tags=["layers"])
        router.add_api_route("", self.list_layers, methods=["GET", "HEAD"], name="layers")
        router.route_class = _SingleLayerRoute
        router.add_api_route("/{name}", self.show_layer, methods=["GET", "HEAD"], name="layer")
        router.add_api_route("/{name}", self.remove_layer, methods=["DELETE"], status_code=204, name="remove layer")
        binary = {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}
        described = {
            "parameters": make_openapi_parameters(LAYER_PARAMETERS, required=("op",)),
            "requestBody": {"required": True, "content": binary},
        }
        router.add_api_route(
            "/{name}", self.register_layer, methods=["PUT"], name="register layer", openapi_extra=described
        )
        return router

    async def list_layers(self, request: Request) -> JSONResponse:
        """Every registered layer, by name."""
        _label_request(request)
        return JSONResponse({"layers": [describe_layer(layer) for layer in self.layers.list_layers()]})

    async def show_layer(self, request: Request, name: str) -> JSONResponse:
        """One registered layer."""
        _label_request(request)
        return JSONResponse(describe_layer(self.layers.get(name)))

    async def remove_layer(self, request: Request, name: str) -> Response:
        """Remove a layer; requests that already use it are not affected."""
        _label_request(request)
        _get_exchange(request).mark_in_progress()
        await self.layer_changes.remove(name)
        return Response(status_code=204)

    async def register_layer(self, request: Request, name: str) -> JSONResponse:
        """Store a weight, and optionally a bias, under a name."""
        _label_request(request)
        if not is_layer_name(name):
            raise InvalidParameterError(f"a layer's name must be {LAYER_NAMES}")
        query = request.scope["query_string"]
        require_valid_layer_query(query)
        self.engine.require_ready()
        headers = request.headers
        content_type = headers.get("content-type", "")
        declared = parse_declared_format(content_type, headers.get("content-encoding", ""))
        body = await self.body_reader.admit_and_receive_body(_get_exchange(request))
        try:
            self._require_safetensors_and_charge(request, declared or detect_format(body), len(body))
            _get_exchange(request).mark_in_progress()
            layer, replaced = await self.layer_changes.register_or_replace(name, query, body)
        except (MalformedPayloadError, UnsupportedMediaTypeError) as error:
            raise add_hints(error, body, declared, is_form=is_form_type(content_type)) from None
        return JSONResponse(describe_layer(layer), status_code=200 if replaced else 201)

    def _require_safetensors_and_charge(self, request: Request, body_format: str, nbytes: int) -> None:
        """Require that the body is safetensors; charge the request's permit for the memory of the layer's copy of
        the body.

        Raises:
            UnsupportedMediaTypeError: the body has another format.
            TooLargeError, OverloadedError: the copy takes too much memory, ever or now.
        """
        if body_format != SAFETENSORS:
            raise UnsupportedMediaTypeError(f"a layer's parameters must be {SAFETENSORS}, got {body_format}")
        _get_exchange(request).charge_body_copy(nbytes)


def _get_exchange(request: Request) -> HttpExchange:
    exchange: HttpExchange = request.state.exchange
    return exchange


def _label_request(request: Request) -> None:
    _get_exchange(request).record.op = "layers"
