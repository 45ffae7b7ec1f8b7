"""Construction of the objects that serve clients on the same host."""

from collections.abc import Awaitable, Callable
from typing import Any

from normserve.engine.busy_polling import SOON_S, make_busy_poller
from normserve.http.application_services import ApplicationServices
from normserve.local.client_segments import DeviceSegmentAllocator, HostSegmentAllocator, OrphanedSegments
from normserve.local.layer_messages import LayerMessageDispatcher
from normserve.local.local_server import LocalServer, make_refusal_frame
from normserve.local.local_services import LocalServices
from normserve.local.local_session import AllowedLocalUsers
from normserve.local.operation_planner import OperationPlanner
from normserve.local.request_replays import RequestReplays
from normserve.process.connection_limits import ConnectionLimits
from normserve.requests.key_authorisation import KeyAuthorisation
from normserve.settings import Settings


def make_local_limits(settings: Settings, on_refused: Callable[[str], None]) -> ConnectionLimits:
    """Make the limits on connections over the Unix socket where clients share memory: one in total and one per
    user.
    """
    return ConnectionLimits(
        max_all=settings.max_connections,
        max_per_address=settings.local_connections,
        on_refused=on_refused,
        reserve=0,
        address_limit_name="local_connections",
        render_refusal=make_refusal_frame,
    )


def make_local_server(
    service: ApplicationServices, describe: Callable[[], Awaitable[dict[str, Any]]]
) -> LocalServer:
    """Make the server for clients on the same host, with the engine, layers and metrics that the HTTP routes use.

    Args:
        describe: makes the response of `/v1/info`.
    """
    settings = service.settings
    layers = LayerMessageDispatcher(service.request_services, service.layers, service.layer_changes)
    memory = HostSegmentAllocator(settings.local_bytes, service.engine.register_host_memory)
    device_memory = DeviceSegmentAllocator(settings.local_device_bytes, lambda: service.engine.shareable_device)
    polls = make_busy_poller(service.request_services.request_progress)
    local = LocalServer(
        LocalServices(
            service.request_services,
            OperationPlanner(service.engine, service.layers),
            layers,
            None if service.keyring is None else KeyAuthorisation(service.keyring, "in hello"),
            memory,
            device_memory,
            OrphanedSegments(),
            describe,
            polls,
            _make_request_replays(service, 0.0 if polls is None else SOON_S),
        ),
        AllowedLocalUsers(settings.local_users),
        frame_s=settings.header_timeout_s,
        send_s=settings.send_timeout_s,
    )
    service.metrics.track_local_clients(
        lambda: local.connection_count, lambda: memory.nbytes, lambda: device_memory.nbytes
    )
    return local


def _make_request_replays(service: ApplicationServices, poll_s: float) -> RequestReplays | None:
    """Make the object that lets a native replayer answer recurring requests without Python.

    Return None if requests are logged or may be traced, since a replayed request is neither.

    Args:
        poll_s: seconds to poll for a request that may follow a response closely.
    """
    services = service.request_services
    if services.is_logged or services.tracer is not None:
        return None
    return RequestReplays(services, service.layers, service.keyring, poll_s=poll_s)
