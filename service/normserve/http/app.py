"""Construction of the application."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from normserve import __version__
from normserve.backends.base import Backend
from normserve.codec.local_frames import VERSION
from normserve.engine.polling import polling
from normserve.errors import (
    NormserveError,
)
from normserve.http.body import BodyReader
from normserve.http.direct import DirectPaths
from normserve.http.edge import error_handlers
from normserve.http.edge.middleware import Edge
from normserve.http.edge.origins import Origins, hosts_of
from normserve.http.oip.catalogue import Catalogue
from normserve.http.oip.infer import Infer
from normserve.http.oip.models import Models
from normserve.http.oip.regions.device import DeviceMemory
from normserve.http.oip.regions.transfer import Transfer
from normserve.http.oip.repository import Repository
from normserve.http.oip.shared_memory import SharedMemory
from normserve.http.oip.shared_tensors import SharedTensors
from normserve.http.oip.statistics import Statistics
from normserve.http.relay.direct import Direct, Parts
from normserve.http.relay.owner import Relays
from normserve.http.routes.docs import describe
from normserve.http.routes.layers import Layers
from normserve.http.routes.operations import Operations
from normserve.http.routes.page import Page
from normserve.http.routes.scopes import RouteScopes
from normserve.http.routes.status import Status
from normserve.http.service import Service
from normserve.peers.siblings import Siblings
from normserve.requests.authorisation import Authorisation
from normserve.requests.prepared_calls import PreparedCalls
from normserve.settings import Settings

# How long the device's thread may take to finish its current work once no request waits for it.
_STOP_S = 2.0
# Memory for what is prepared of requests over HTTP, of all clients together.
_PREPARED_BYTES = 16 * 2**20
# How long a collector may take to accept the last traces.
_LAST_TRACES_S = 2.0


def create_app(
    settings: Settings, make_backend: Callable[[], Backend] | None = None, siblings: Siblings | None = None
) -> FastAPI:
    """The application; a server calls `app.state.entrance`, and `app.state.service` has the objects that it uses.

    Args:
        make_backend: called on the thread that will own the device; by default the settings choose the backend.
        siblings: the other processes, if this is one of several.
    """
    service = Service(settings, make_backend, siblings)
    app = FastAPI(
        title="normserve",
        version=__version__,
        description="Fused LayerNorm, RMSNorm and GroupNorm as a service.",
        lifespan=_lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        # Most requests never reach FastAPI, and those that do have the server's own spans.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        exception_handlers={
            HTTPException: error_handlers.answer_http_exception,
            RequestValidationError: error_handlers.answer_invalid_request,
            NormserveError: error_handlers.answer_error,
            Exception: error_handlers.answer_unexpected,
        },
    )
    app.state.service = service
    prepared = PreparedCalls(_PREPARED_BYTES, service.metrics.prepared_call_counters("process"))
    relays = app.state.relays = Relays(
        service.shared, service.slabs, service.metrics, prepared, polling(service.stalls.requests)
    )
    # The front ends are linked to all processes with a device; only the first of these reports them.
    if service.siblings.place is None or service.siblings.place.index == 0:
        service.metrics.watch_front_ends(lambda: [(each["index"], each["pid"]) for each in relays.described()])
    status = _status(service, relays)
    app.state.describe = status.describe
    bodies = _bodies(service)
    operations = Operations(bodies, service.layers, prepared)
    routers = [
        operations.router(),
        Layers(service.engine, service.layers, service.changes, bodies).router(),
        *_inference_protocol(service, bodies, prepared),
        status.router(),
        Page(service.keys is not None, settings.tls_client_ca is not None).router(),
    ]
    app.state.routes = [route for router in routers for route in router.routes]
    # Included routers would be matched twice for each request, and after FastAPI's own pages.
    app.router.routes[:0] = app.state.routes
    scopes = RouteScopes(app.router.routes, metrics_are_public=settings.api_keys_file is None)
    app.openapi = describe(app, None if service.keys is None else scopes)  # type: ignore[method-assign]
    cors_origins = settings.cors_origins.split(",") if settings.cors_origins else ()
    origins = Origins(hosts_of(settings.host, settings.allowed_hosts), cors_origins)
    authorisation = None
    if service.keys is not None:
        authorisation = Authorisation(service.keys, "as Authorization: Bearer KEY")
    app.state.entrance = Edge(
        DirectPaths(app, app.state.routes),
        service.requests,
        origins,
        scopes,
        authorisation,
    )
    relays.relay_to(
        app.state.entrance, Direct(Parts(operations.by_path(), origins, authorisation, service.requests))
    )
    return app


def _inference_protocol(service: Service, bodies: BodyReader, prepared: PreparedCalls) -> list[APIRouter]:
    """The routers of the paths below `/v2`."""
    models = Models(service.layers)
    statistics = Statistics(lambda: [model.name for model in models.all()])
    regions = service.regions
    device_memory = DeviceMemory(service.settings.oip_cuda_shared_memory, service.engine)
    catalogue = Catalogue(
        service.engine,
        service.stalls,
        models,
        service.layers,
        statistics,
        service.siblings,
        regions,
        device_memory,
    )
    catalogue.answer_siblings()
    shared = SharedTensors(regions, Transfer(service.slabs), device_memory)
    return [
        Infer(bodies, models, service.layers, statistics, shared, prepared).router(),
        SharedMemory(regions, device_memory, bodies).router(),
        catalogue.router(),
        Repository(models, service.changes, bodies).router(),
    ]


def _status(service: Service, relays: Relays) -> Status:
    settings = service.settings
    limits = settings.model_dump(
        include={
            "max_body_bytes",
            "max_inflight_requests",
            "max_inflight_bytes",
            "max_batch_requests",
            "max_batch_bytes",
            "max_layers",
            "max_layer_bytes",
            "timeout_ms",
        }
    )
    local = None
    if settings.local is not None:
        local = {
            "path": str(settings.local),
            "version": VERSION,
            "max_bytes": settings.local_bytes,
            "max_connections": settings.local_connections,
            "max_device_bytes": settings.local_device_bytes,
        }
    stalls = service.stalls
    status = Status(
        service.engine,
        service.layers,
        service.metrics,
        service.siblings,
        stalls,
        limits,
        local,
        relays.described,
    )
    status.answer_siblings()
    return status


def _bodies(service: Service) -> BodyReader:
    settings = service.settings
    return BodyReader(
        service.slabs,
        max_body_bytes=settings.max_body_bytes,
        pause_s=settings.body_timeout_s,
        total_s=settings.transfer_timeout_s,
        min_bytes_per_s=settings.min_body_bytes_per_s,
        grace_s=settings.body_grace_s,
    )


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    # The server listens while it warms up, and /readyz reports that.
    warming = asyncio.create_task(service.warm_up())
    app.state.warming = warming
    watching = asyncio.create_task(service.watch_keys())
    try:
        yield
    finally:
        watching.cancel()
        service.engine.close()
        warming.cancel()
        # An error of the start was reported then.
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await warming
        # Work that still runs keeps its regions; the driver unmaps the others while it is still loaded.
        service.regions.close()
        await asyncio.to_thread(service.engine.stop, _STOP_S)
        if service.traces is not None:
            await service.traces.close(_LAST_TRACES_S)
