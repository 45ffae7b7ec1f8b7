"""`/v1/layers`: parameters that stay on the server under a name."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from normserve.codec import safetensors
from normserve.codec.media_types import SAFETENSORS
from normserve.engine.engine import Engine
from normserve.errors import InvalidParameterError, UnsupportedMediaTypeError
from normserve.http.exchange import Exchange
from normserve.http.routes.admission import Admission
from normserve.http.routes.body import BodyReader
from normserve.http.routes.negotiation import declared_format, sniffed_format
from normserve.http.routes.parameters import (
    LAYER_PARAMETERS,
    default_eps,
    describe,
    parse_query,
)
from normserve.jobs.job import Layer, Op
from normserve.jobs.validation import check_group_count, check_parameters
from normserve.layers.changes import LayerChanges
from normserve.layers.registry import LAYER_NAMES, LayerRegistry, is_layer_name


@dataclass(frozen=True, slots=True)
class Layers:
    """What the layers' handlers work with."""

    engine: Engine
    layers: LayerRegistry
    changes: LayerChanges
    bodies: BodyReader
    admission: Admission

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
        return JSONResponse({"layers": [_described(layer) for layer in self.layers.all()]})

    async def show(self, request: Request, name: str) -> JSONResponse:
        """One registered layer."""
        _note(request)
        return JSONResponse(_described(self.layers.get(name)))

    async def remove(self, request: Request, name: str) -> Response:
        """Forget a layer; requests that already use it are not disturbed."""
        _note(request)
        _exchange(request).begin_work()
        await self.changes.remove(name)
        return Response(status_code=204)

    async def register(self, request: Request, name: str) -> JSONResponse:
        """Keep a weight, and a bias if there is one, under a name."""
        _note(request)
        if not is_layer_name(name):
            raise InvalidParameterError(f"a layer's name must be {LAYER_NAMES}")
        query = request.scope["query_string"]
        _operation(parse_query(query, LAYER_PARAMETERS))
        self.engine.require_ready()
        body = await self._read(request)
        _exchange(request).begin_work()
        layer, replaced = await self.changes.register(name, query, body)
        return JSONResponse(_described(layer), status_code=200 if replaced else 201)

    async def _read(self, request: Request) -> memoryview:
        headers = request.headers
        declared = declared_format(headers.get("content-type", ""), headers.get("content-encoding", ""))
        exchange = _exchange(request)
        body = await self.bodies.read(exchange)
        if (declared or sniffed_format(body)) != SAFETENSORS:
            raise UnsupportedMediaTypeError(f"a layer's parameters must be {SAFETENSORS}")
        self.admission.charge_copy(exchange, len(body))
        return body


async def make_layer(engine: Engine, layers: LayerRegistry, name: str, query: bytes, body: memoryview) -> Layer:
    """The layer that a query and a safetensors body describe, its parameters on the device; not registered yet.

    Raises:
        TooLargeError: `layers` has no room for it.
        NormserveError: by what is wrong with them, or with the device.
    """
    values = parse_query(query, LAYER_PARAMETERS)
    op = _operation(values)
    weight, bias = check_parameters(op, safetensors.decode(body))
    num_groups = values.get("num_groups", 0)
    if num_groups:
        check_group_count(num_groups, weight.shape[0])
    nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
    with layers.expecting(name, nbytes):
        resident = await engine.load(op, weight, bias)
    return Layer(
        name=name,
        op=op,
        eps=values.get("eps", default_eps(op)),
        num_groups=num_groups,
        activation=values.get("activation", "none"),
        size=weight.shape[0],
        dtype=weight.dtype,
        has_bias=bias is not None,
        nbytes=nbytes,
        resident=resident,
    )


def _operation(values: dict[str, Any]) -> Op:
    if "op" not in values:
        raise InvalidParameterError("op must be given: " + ", ".join(op.value for op in Op))
    op = Op(values["op"])
    if (op is Op.GROUP_NORM) != ("num_groups" in values):
        raise InvalidParameterError("num_groups must be given for group_norm, and for nothing else")
    return op


def _exchange(request: Request) -> Exchange:
    exchange: Exchange = request.state.exchange
    return exchange


def _note(request: Request) -> None:
    _exchange(request).record.op = "layers"


def _described(layer: Layer) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": layer.name,
        "op": layer.op.value,
        "eps": layer.eps,
        "activation": layer.activation,
        "size": layer.size,
        "dtype": layer.dtype.value,
        "bias": layer.has_bias,
    }
    return described | {"num_groups": layer.num_groups} if layer.op is Op.GROUP_NORM else described
