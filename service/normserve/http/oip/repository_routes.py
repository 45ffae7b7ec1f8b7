"""`/v2/repository`: lists the models, and removes layers.  Layers are registered with `/v1/layers`."""

from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from normserve.errors import InvalidParameterError, MalformedPayloadError, NormserveError
from normserve.errors.name_suggestions import suggest_name
from normserve.http.body_reader import BodyReader, require_uncompressed
from normserve.http.http_exchange import HttpExchange
from normserve.http.oip.inference_request import require_json_limit, strip_byte_order_mark
from normserve.http.oip.metric_labels import label_request
from normserve.http.oip.models import VERSION, ModelCatalogue
from normserve.layers.layer_changes import LayerChanges

_READY = "READY"
_JSON = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class RepositoryRoutes:
    """The handlers of `/v2/repository`, which list models and load or unload one."""

    model_catalogue: ModelCatalogue
    layer_changes: LayerChanges
    body_reader: BodyReader

    def make_router(self) -> APIRouter:
        """Make the routes that list models, and that load or unload one."""
        router = APIRouter(prefix="/v2/repository", tags=["open inference protocol"])
        router.add_api_route("/index", self.list_models, methods=["POST"])
        router.add_api_route("/models/{name}/load", self.load_model, methods=["POST"])
        router.add_api_route("/models/{name}/unload", self.unload_model, methods=["POST"])
        return router

    async def list_models(self, request: Request) -> JSONResponse:
        """Every model; all of them are ready."""
        exchange = label_request(request, "repository")
        document = await self._read_json(exchange)
        _require_known_fields(document, ("ready",))
        if not isinstance(document.get("ready", False), bool):
            raise InvalidParameterError("ready must be true or false")
        models = [
            {"name": each.name, "version": VERSION, "state": _READY, "reason": ""}
            for each in self.model_catalogue.list_models()
        ]
        return JSONResponse(models)

    async def load_model(self, request: Request, name: str) -> Response:
        """Do nothing for an existing model; no other can be loaded, and no parameters are allowed."""
        exchange = label_request(request, "repository")
        parameters = _get_parameters(await self._read_json(exchange))
        if parameters:
            raise InvalidParameterError(
                "a model is loaded as it was registered, without config and files; PUT /v1/layers registers it"
            )
        self.model_catalogue.find_model(name)
        return JSONResponse({})

    async def unload_model(self, request: Request, name: str) -> Response:
        """Remove a registered layer; requests that already use it are not affected."""
        exchange = label_request(request, "layers")
        parameters = _get_parameters(await self._read_json(exchange))
        _require_known_fields(parameters, ("unload_dependents",))
        if not self.model_catalogue.find_model(name).is_layer:
            raise MalformedPayloadError(f"{name} is an operation, which cannot be unloaded; registered layers can")
        exchange.mark_in_progress()
        await self.layer_changes.remove(name)
        return JSONResponse({})

    async def _read_json(self, exchange: HttpExchange) -> dict[str, Any]:
        """Receive the body and parse its JSON object; return an empty object if there is no body.

        Raises:
            NormserveError: the body is not a JSON object, or too long.
        """
        require_uncompressed(exchange.headers.get(b"content-encoding", b"").decode("latin-1"))
        require_json_limit(exchange.incoming_body.content_length or 0)
        body = await self.body_reader.admit_and_receive_body(exchange)
        try:
            require_json_limit(len(body))
            return _JSON.decode(strip_byte_order_mark(body)) if body else {}
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise MalformedPayloadError("the body must be a JSON object, or none") from None


def _get_parameters(document: dict[str, Any]) -> dict[str, Any]:
    """Return the `parameters` of a request's JSON, empty if they are absent.

    Raises:
        InvalidParameterError: the JSON has another field.
        MalformedPayloadError: `parameters` is not an object.
    """
    _require_known_fields(document, ("parameters",))
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise MalformedPayloadError("parameters must be an object")
    return parameters


def _require_known_fields(document: dict[str, Any], known_fields: tuple[str, ...]) -> None:
    for name in document:
        if name not in known_fields:
            raise _make_unknown_error(name, known_fields)


def _make_unknown_error(name: str, known_fields: tuple[str, ...]) -> NormserveError:
    return InvalidParameterError(f"{name[:64]!r} is not a known field; {suggest_name(name, known_fields)}")
