"""Construction of the application."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from normserve import __version__
from normserve.backends.interface import Backend
from normserve.codec.local_messages import VERSION
from normserve.engine.busy_polling import make_busy_poller
from normserve.errors import (
    NormserveError,
)
from normserve.http.application_services import ApplicationServices
from normserve.http.body_reader import BodyReader
from normserve.http.direct_routes import DirectRouter
from normserve.http.middleware import error_handlers
from normserve.http.middleware.origin_policy import OriginPolicy, list_allowed_hosts
from normserve.http.middleware.request_middleware import RequestMiddleware
from normserve.http.oip.inference_routes import InferenceRoutes
from normserve.http.oip.inference_statistics import InferenceStatistics
from normserve.http.oip.model_routes import ModelRoutes
from normserve.http.oip.models import ModelCatalogue
from normserve.http.oip.region_tensors import RegionTensorAccess, RegionTransfer
from normserve.http.oip.regions.device_regions import DeviceRegionOpener
from normserve.http.oip.repository_routes import RepositoryRoutes
from normserve.http.oip.shared_memory_routes import SharedMemoryRoutes
from normserve.http.relay.relay_server import RelayServer
from normserve.http.relay.relayed_operations import OperationDispatcher, OperationServices
from normserve.http.routes.layer_routes import LayerRoutes
from normserve.http.routes.openapi import make_openapi_getter
from normserve.http.routes.operation_routes import OperationRoutes
from normserve.http.routes.page_routes import PageRoutes
from normserve.http.routes.route_scopes import RouteScopes
from normserve.http.routes.status_routes import StatusRoutes
from normserve.peers.sibling_processes import SiblingProcesses
from normserve.requests.key_authorisation import KeyAuthorisation
from normserve.requests.prepared_calls import PreparedCallCache
from normserve.settings import Settings

# How long the device's thread may take to finish its current work once no request waits for it.
_STOP_S = 2.0
# Memory for the prepared calls of all HTTP clients together.
_PREPARED_BYTES = 16 * 2**20
# How long a collector may take to accept the last traces.
_LAST_TRACES_S = 2.0


def create_app(
    settings: Settings, make_backend: Callable[[], Backend] | None = None, siblings: SiblingProcesses | None = None
) -> FastAPI:
    """Create the FastAPI application with its middleware, routes and shared services.

    A server must call `app.state.entrance`, the middleware around `app`, which checks hosts, origins
    and keys.  `app.state.service` has the `ApplicationServices`.

    Args:
        make_backend: called on the thread that will own the device; by default the settings choose the
            backend.
        siblings: the other processes, if this is one of several.
    """
    service = ApplicationServices(settings, make_backend, siblings)
    app = FastAPI(
        title="normserve",
        version=__version__,
        description="Fused LayerNorm, RMSNorm and GroupNorm as a service.",
        lifespan=_run_lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        # Most requests never reach FastAPI, and those that do have the server's own spans.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        exception_handlers={
            HTTPException: error_handlers.handle_http_exception,
            RequestValidationError: error_handlers.handle_validation_error,
            NormserveError: error_handlers.handle_normserve_error,
            Exception: error_handlers.handle_unexpected_error,
        },
    )
    app.state.service = service
    prepared = PreparedCallCache(_PREPARED_BYTES, service.metrics.get_prepared_call_counters("process"))
    relays = app.state.relays = RelayServer(
        service.shared_slabs,
        service.slab_pool,
        service.metrics,
        prepared,
        make_busy_poller(service.stall_detector.request_progress),
    )
    # The front ends are linked to all processes with a device; only the first of these reports them.
    if service.sibling_processes.position is None or service.sibling_processes.position.index == 0:
        service.metrics.track_front_ends(
            lambda: [(each["index"], each["pid"]) for each in relays.describe_front_ends()]
        )
    status = _make_status_routes(service, relays)
    app.state.describe = status.describe_server
    bodies = _make_body_reader(service)
    operations = OperationRoutes(bodies, service.layers, prepared)
    routers = [
        operations.make_router(),
        LayerRoutes(service.engine, service.layers, service.layer_changes, bodies).make_router(),
        *_make_oip_routers(service, bodies, prepared),
        status.make_router(),
        PageRoutes(service.keyring is not None, settings.tls_client_ca is not None).make_router(),
    ]
    app.state.routes = [route for router in routers for route in router.routes]
    # Included routers would be matched twice for each request, and after FastAPI's own pages.
    app.router.routes[:0] = app.state.routes
    scopes = RouteScopes(app.router.routes, metrics_are_public=settings.api_keys_file is None)
    app.openapi = make_openapi_getter(app, None if service.keyring is None else scopes)  # type: ignore[method-assign]
    cors_origins = settings.cors_origins.split(",") if settings.cors_origins else ()
    origins = OriginPolicy(list_allowed_hosts(settings.host, settings.allowed_hosts), cors_origins)
    authorisation = None
    if service.keyring is not None:
        authorisation = KeyAuthorisation(service.keyring, "as Authorization: Bearer KEY")
    app.state.entrance = RequestMiddleware(
        DirectRouter(app, app.state.routes),
        service.request_services,
        origins,
        scopes,
        authorisation,
    )
    relays.set_application(
        app.state.entrance,
        OperationDispatcher(
            OperationServices(operations.make_endpoints(), origins, authorisation, service.request_services)
        ),
    )
    return app


def _make_oip_routers(
    service: ApplicationServices, bodies: BodyReader, prepared: PreparedCallCache
) -> list[APIRouter]:
    """Make the routers of the Open Inference Protocol, whose paths are below `/v2`.

    Also register the handler that sends this process's statistics to other processes of the fleet.
    """
    models = ModelCatalogue(service.layers)
    statistics = InferenceStatistics(lambda: [model.name for model in models.list_models()])
    regions = service.regions
    device_memory = DeviceRegionOpener(service.settings.oip_cuda_shared_memory, service.engine)
    catalogue = ModelRoutes(
        service.engine,
        service.stall_detector,
        models,
        service.layers,
        statistics,
        service.sibling_processes,
        regions,
        device_memory,
    )
    catalogue.register_sibling_handlers()
    shared = RegionTensorAccess(regions, RegionTransfer(service.slab_pool), device_memory)
    return [
        InferenceRoutes(bodies, models, service.layers, statistics, shared, prepared).make_router(),
        SharedMemoryRoutes(regions, device_memory, bodies).make_router(),
        catalogue.make_router(),
        RepositoryRoutes(models, service.layer_changes, bodies).make_router(),
    ]


def _make_status_routes(service: ApplicationServices, relays: RelayServer) -> StatusRoutes:
    """Make the handlers of the probes, `/metrics`, `/v1/info` and the sample tensor.

    Also register the handlers that send this process's metrics and information to other processes of
    the fleet.
    """
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
    stalls = service.stall_detector
    status = StatusRoutes(
        service.engine,
        service.layers,
        service.metrics,
        service.sibling_processes,
        stalls,
        limits,
        local,
        relays.describe_front_ends,
    )
    status.register_sibling_handlers()
    return status


def _make_body_reader(service: ApplicationServices) -> BodyReader:
    """Make the reader of request bodies, with the limits of the settings."""
    settings = service.settings
    return BodyReader(
        service.slab_pool,
        max_body_bytes=settings.max_body_bytes,
        max_pause_s=settings.body_timeout_s,
        max_total_s=settings.transfer_timeout_s,
        min_bytes_per_s=settings.min_body_bytes_per_s,
        grace_s=settings.body_grace_s,
    )


@contextlib.asynccontextmanager
async def _run_lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Warm up at the start of the server; at its end drain, then stop the engine and the tracer.

    The server already listens while it warms up.  Meanwhile `/readyz` reports that it is not ready.
    """
    service: ApplicationServices = app.state.service
    # The server listens while it warms up, and /readyz reports that.
    warming = asyncio.create_task(service.warm_up_and_accept_jobs())
    app.state.warming = warming
    watching = asyncio.create_task(service.reload_keys_on_change())
    try:
        yield
    finally:
        watching.cancel()
        service.engine.start_draining()
        warming.cancel()
        # An error of the start was reported then.
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await warming
        # Work that still runs keeps its regions; the driver unmaps the others while it is still loaded.
        service.regions.unregister_all()
        await asyncio.to_thread(service.engine.stop, _STOP_S)
        if service.tracer is not None:
            await service.tracer.close(_LAST_TRACES_S)
