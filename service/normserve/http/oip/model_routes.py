"""Routes for the server and its models in the protocol: metadata, health, configuration, statistics.

A model's inputs and outputs are described for the protocol's metadata and for Triton's model configuration.
"""

import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from normserve import __version__
from normserve.codec.api_names import (
    OF_SAMPLES,
    PARAMETER_GRADIENTS,
    SAMPLE_GRADIENTS,
    STATISTICS,
    is_parameter,
)
from normserve.engine.engine import Engine
from normserve.engine.progress import StallDetector
from normserve.errors import NormserveError, RetryLaterError
from normserve.http.oip.datatypes import NAMES
from normserve.http.oip.inference_request import list_input_names, list_output_names
from normserve.http.oip.inference_statistics import InferenceStatistics, make_statistics_document
from normserve.http.oip.metric_labels import label_request
from normserve.http.oip.models import VERSION, InferenceModel, ModelCatalogue
from normserve.http.oip.regions.device_regions import DeviceRegionOpener
from normserve.http.oip.regions.region_registry import RegionRegistry
from normserve.jobs.job import Op, PassDirection, RegisteredLayer
from normserve.layers.registry import LayerRegistry
from normserve.memory.tensors import DType
from normserve.peers.sibling_processes import Question, SiblingProcesses

_PLATFORM = "normserve"
_ANY = -1

_EXTENSIONS = ("binary_tensor_data", "statistics", "model_repository", "model_configuration", "parameters")

_READS = ["GET", "HEAD"]
_QUESTION = "oip_statistics"


@dataclass(frozen=True, slots=True)
class ModelRoutes:
    """The handlers of the routes for metadata, health, configuration and statistics of models.

    Attributes:
        regions, device_regions: determine whether clients may register system and CUDA shared memory.
    """

    engine: Engine
    stall_detector: StallDetector
    model_catalogue: ModelCatalogue
    layers: LayerRegistry
    statistics: InferenceStatistics
    sibling_processes: SiblingProcesses
    regions: RegionRegistry
    device_regions: DeviceRegionOpener

    def make_router(self) -> APIRouter:
        """Make the routes for metadata, health, configuration and statistics, none of which changes anything."""
        router = APIRouter(tags=["open inference protocol"])
        router.add_api_route("/v2", self.show_server, methods=_READS)
        # As the protocol's own OpenAPI document writes the path.
        router.add_api_route("/v2/", self.show_server, methods=_READS, include_in_schema=False)
        router.add_api_route("/v2/health/live", self.show_liveness, methods=_READS)
        router.add_api_route("/v2/health/ready", self.show_readiness, methods=_READS)
        # Before a model of the name `stats`, whose own statistics are below its version.
        router.add_api_route("/v2/models/stats", self.show_all_statistics, methods=_READS)
        for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            router.add_api_route(model, self.show_model, methods=_READS)
            router.add_api_route(f"{model}/ready", self.show_model_readiness, methods=_READS)
            router.add_api_route(f"{model}/config", self.show_configuration, methods=_READS)
            router.add_api_route(f"{model}/stats", self.show_statistics, methods=_READS)
        return router

    def register_sibling_handlers(self) -> None:
        """Register the handler that sends this process's statistics to other processes of the fleet."""

        async def counted(question: Question, at_end: AsyncExitStack) -> bytes:
            return json.dumps(self.statistics.to_dict()).encode()

        self.sibling_processes.handlers[_QUESTION] = counted

    async def show_server(self, request: Request) -> JSONResponse:
        """The server and its extensions of the protocol."""
        label_request(request, "info")
        of_memory = {
            "system_shared_memory": self.regions.is_enabled,
            "cuda_shared_memory": self.device_regions.is_enabled,
        }
        extensions = [*_EXTENSIONS, *(name for name, is_on in of_memory.items() if is_on)]
        return JSONResponse({"name": _PLATFORM, "version": __version__, "extensions": extensions})

    async def show_liveness(self, request: Request) -> JSONResponse:
        """200 while the process works."""
        label_request(request, "livez")
        return JSONResponse({"live": True})

    async def show_readiness(self, request: Request) -> JSONResponse:
        """200 once warmed up, while requests are accepted and finished and no signal has come, else 400 with the
        reason.
        """
        label_request(request, "readyz")
        try:
            self.engine.require_available()
            self.stall_detector.require_progress()
        except NormserveError as error:
            return JSONResponse({"error": error.detail}, status_code=400)
        return JSONResponse({"ready": True})

    async def show_model(self, request: Request, name: str, version: str | None = None) -> JSONResponse:
        """The inputs and outputs of a model."""
        label_request(request, "models")
        return JSONResponse(_describe_model(*self._find_model(name, version)))

    async def show_model_readiness(self, request: Request, name: str, version: str | None = None) -> Response:
        """200 if the model exists and the server is ready, else 404 or 400."""
        label_request(request, "models")
        try:
            self._find_model(name, version)
            self._require_ready()
        except RetryLaterError as error:
            return JSONResponse({"error": error.detail}, status_code=400)
        return JSONResponse({"name": name, "ready": True})

    async def show_configuration(self, request: Request, name: str, version: str | None = None) -> JSONResponse:
        """A model's configuration."""
        label_request(request, "models")
        return JSONResponse(_describe_configuration(*self._find_model(name, version)))

    async def show_statistics(self, request: Request, name: str, version: str | None = None) -> JSONResponse:
        """Statistics of a model's inferences."""
        label_request(request, "model_stats")
        self._find_model(name, version)
        return JSONResponse(make_statistics_document([name], await self._collect_counts()))

    async def show_all_statistics(self, request: Request) -> JSONResponse:
        """Statistics of the inferences of all models."""
        label_request(request, "model_stats")
        return JSONResponse(
            make_statistics_document(
                [each.name for each in self.model_catalogue.list_models()], await self._collect_counts()
            )
        )

    async def _collect_counts(self) -> list[dict[str, object]]:
        """Collect the statistics of this process and of all other processes of the fleet that answer."""
        if self.sibling_processes.position is None:
            return [self.statistics.to_dict()]
        answers = await self.sibling_processes.request_all(_QUESTION)
        return [self.statistics.to_dict(), *map(json.loads, answers.values())]

    def _find_model(self, name: str, version: str | None) -> tuple[InferenceModel, RegisteredLayer | None]:
        model = self.model_catalogue.find_model(name, version)
        return model, self.layers.get(name) if model.is_layer else None

    def _require_ready(self) -> None:
        self.engine.require_ready()
        self.stall_detector.require_progress()


def _describe_model(model: InferenceModel, layer: RegisteredLayer | None) -> dict[str, Any]:
    """Make the metadata of a model in the protocol's form: its version, inputs and outputs.

    In a shape, -1 is an arbitrary size.  The rank of x may differ, too.

    Args: layer: the registered layer, if the model is one; else None.
    """
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": _PLATFORM,
        "inputs": [_describe_tensor(model, layer, name) for name in list_input_names(model)],
        "outputs": [_describe_tensor(model, layer, name) for name in list_output_names(model)],
    }


def _describe_configuration(model: InferenceModel, layer: RegisteredLayer | None) -> dict[str, Any]:
    """Make the configuration of a model in Triton's form, with the fields that this server has."""
    required = ("x", "dy")

    def describe_tensor(name: str) -> dict[str, Any]:
        description = _describe_tensor(model, layer, name)
        return {"name": name, "data_type": f"TYPE_{description['datatype']}", "dims": description["shape"]}

    return {
        "name": model.name,
        "platform": _PLATFORM,
        "backend": _PLATFORM,
        "max_batch_size": 0,
        "input": [describe_tensor(name) | {"optional": name not in required} for name in list_input_names(model)],
        "output": [describe_tensor(name) for name in list_output_names(model)],
    }


def _describe_tensor(model: InferenceModel, layer: RegisteredLayer | None, name: str) -> dict[str, Any]:
    """Describe an input or output of a model: its name, datatype and shape.

    The datatype is the most usual one: the server accepts others, too.
    """
    dtype = DType.FLOAT32
    if layer is not None and model.direction is PassDirection.FORWARD and name not in STATISTICS:
        dtype = layer.dtype
    return {"name": name, "datatype": NAMES[dtype], "shape": _describe_shape(model, layer, name)}


def _describe_shape(model: InferenceModel, layer: RegisteredLayer | None, name: str) -> list[int]:
    """Return the shape of an input or output, in which -1 is an arbitrary size.

    Args: layer: the registered layer, which determines sizes; None if the model is an operation.
    """
    size = _ANY if layer is None else layer.size
    row = [size] if layer is None else list(layer.parameter_shape)
    name = name[1:] if name in (*PARAMETER_GRADIENTS, *SAMPLE_GRADIENTS) else name
    of_groups = model.op is Op.GROUP_NORM
    if is_parameter(name):
        return row
    if name in OF_SAMPLES:
        return [_ANY, size]
    if name in STATISTICS:
        return [_ANY, _ANY if layer is None else layer.spec.num_groups] if of_groups else [_ANY, *row[:-1]]
    return [_ANY, size, _ANY] if of_groups else [_ANY, *row]
