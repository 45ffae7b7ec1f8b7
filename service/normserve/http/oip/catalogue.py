"""The server and its models in the protocol: metadata, health, configuration, statistics."""

import json
from contextlib import AsyncExitStack
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from normserve import __version__
from normserve.engine.engine import Engine
from normserve.engine.progress import StallDetector
from normserve.errors import NormserveError, RetryLaterError
from normserve.http.oip.descriptions import PLATFORM, describe_configuration, describe_model
from normserve.http.oip.models import InferenceModel, ModelCatalogue
from normserve.http.oip.notes import label_request
from normserve.http.oip.regions.device import DeviceRegionOpener
from normserve.http.oip.regions.registry import RegionRegistry
from normserve.http.oip.statistics import InferenceStatistics, make_document
from normserve.jobs.job import RegisteredLayer
from normserve.layers.registry import LayerRegistry
from normserve.peers.siblings import Question, SiblingProcesses

EXTENSIONS = ("binary_tensor_data", "statistics", "model_repository", "model_configuration", "parameters")

_READS = ["GET", "HEAD"]
_QUESTION = "oip_statistics"


@dataclass(frozen=True, slots=True)
class ModelRoutes:
    """The routes for metadata, health, configuration and statistics.

    Attributes:
        regions, device_memory: whether clients may register regions of shared memory and of CUDA memory.
    """

    engine: Engine
    stalls: StallDetector
    models: ModelCatalogue
    layers: LayerRegistry
    statistics: InferenceStatistics
    siblings: SiblingProcesses
    regions: RegionRegistry
    device_memory: DeviceRegionOpener

    def router(self) -> APIRouter:
        """The routes, all of which only read."""
        router = APIRouter(tags=["open inference protocol"])
        router.add_api_route("/v2", self.server, methods=_READS)
        # As the protocol's own OpenAPI document writes the path.
        router.add_api_route("/v2/", self.server, methods=_READS, include_in_schema=False)
        router.add_api_route("/v2/health/live", self.live, methods=_READS)
        router.add_api_route("/v2/health/ready", self.ready, methods=_READS)
        # Before a model of the name `stats`, whose own statistics are below its version.
        router.add_api_route("/v2/models/stats", self.all_statistics, methods=_READS)
        for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            router.add_api_route(model, self.show, methods=_READS)
            router.add_api_route(f"{model}/ready", self.model_ready, methods=_READS)
            router.add_api_route(f"{model}/config", self.configuration, methods=_READS)
            router.add_api_route(f"{model}/stats", self.model_statistics, methods=_READS)
        return router

    def answer_siblings(self) -> None:
        """Send this process's counts to the other processes of the fleet on request."""

        async def counted(question: Question, at_end: AsyncExitStack) -> bytes:
            return json.dumps(self.statistics.plain()).encode()

        self.siblings.handlers[_QUESTION] = counted

    async def server(self, request: Request) -> JSONResponse:
        """The server and its extensions of the protocol."""
        label_request(request, "info")
        of_memory = {"system_shared_memory": self.regions.is_on, "cuda_shared_memory": self.device_memory.is_on}
        extensions = [*EXTENSIONS, *(name for name, is_on in of_memory.items() if is_on)]
        return JSONResponse({"name": PLATFORM, "version": __version__, "extensions": extensions})

    async def live(self, request: Request) -> JSONResponse:
        """200 while the process works."""
        label_request(request, "livez")
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> JSONResponse:
        """200 once warmed up and while requests are accepted and finished, else 400 with the reason."""
        label_request(request, "readyz")
        try:
            self._require_ready()
        except NormserveError as error:
            return JSONResponse({"error": error.detail}, status_code=400)
        return JSONResponse({"ready": True})

    async def show(self, request: Request, name: str, version: str | None = None) -> JSONResponse:
        """The inputs and outputs of a model."""
        label_request(request, "models")
        return JSONResponse(describe_model(*self._model(name, version)))

    async def model_ready(self, request: Request, name: str, version: str | None = None) -> Response:
        """200 if the model exists and the server is ready, else 404 or 400."""
        label_request(request, "models")
        try:
            self._model(name, version)
            self._require_ready()
        except RetryLaterError as error:
            return JSONResponse({"error": error.detail}, status_code=400)
        return JSONResponse({"name": name, "ready": True})

    async def configuration(self, request: Request, name: str, version: str | None = None) -> JSONResponse:
        """A model's configuration."""
        label_request(request, "models")
        return JSONResponse(describe_configuration(*self._model(name, version)))

    async def model_statistics(self, request: Request, name: str, version: str | None = None) -> JSONResponse:
        """Statistics of a model's inferences."""
        label_request(request, "model_stats")
        self._model(name, version)
        return JSONResponse(make_document([name], await self._counted()))

    async def all_statistics(self, request: Request) -> JSONResponse:
        """Statistics of the inferences of all models."""
        label_request(request, "model_stats")
        return JSONResponse(make_document([each.name for each in self.models.all()], await self._counted()))

    async def _counted(self) -> list[dict[str, object]]:
        """The counts of each process of the fleet that answers."""
        if self.siblings.place is None:
            return [self.statistics.plain()]
        answers = await self.siblings.request(_QUESTION)
        return [self.statistics.plain(), *map(json.loads, answers.values())]

    def _model(self, name: str, version: str | None) -> tuple[InferenceModel, RegisteredLayer | None]:
        model = self.models.get(name, version)
        return model, self.layers.get(name) if model.is_layer else None

    def _require_ready(self) -> None:
        self.engine.require_ready()
        self.stalls.require_progress()
