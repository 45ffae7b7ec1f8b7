"""Construction of the objects that serve clients on the same host."""

from collections.abc import Awaitable, Callable
from typing import Any

from normserve.engine.polling import SOON_S, polling
from normserve.http.service import Service
from normserve.local.device import DeviceArenas
from normserve.local.layers import LayerMessages
from normserve.local.memory import Leftovers, SharedMemory
from normserve.local.operations import Operations
from normserve.local.peer import Users
from normserve.local.replaying import Replaying
from normserve.local.server import LocalServer, refusal
from normserve.local.service import Service as LocalService
from normserve.process.connections import ConnectionLimits
from normserve.requests.authorisation import Authorisation
from normserve.settings import Settings


def local_limits(settings: Settings, on_refused: Callable[[str], None]) -> ConnectionLimits:
    """The limits on connections of such clients."""
    return ConnectionLimits(
        max_all=settings.max_connections,
        max_per_address=settings.local_connections,
        on_refused=on_refused,
        reserve=0,
        of_address="local_connections",
        farewell=refusal,
    )


def local_server(service: Service, describe: Callable[[], Awaitable[dict[str, Any]]]) -> LocalServer:
    """A server for such clients, which uses the same objects as the HTTP routes.

    Args: describe: makes the response of `/v1/info`.
    """
    settings = service.settings
    layers = LayerMessages(service.requests, service.layers, service.changes)
    memory = SharedMemory(settings.local_bytes, service.engine.share)
    device_memory = DeviceArenas(settings.local_device_bytes, lambda: service.engine.device_memory)
    polls = polling(service.requests.progress)
    local = LocalServer(
        LocalService(
            service.requests,
            Operations(service.engine, service.layers),
            layers,
            None if service.keys is None else Authorisation(service.keys, "in hello"),
            memory,
            device_memory,
            Leftovers(),
            describe,
            polls,
            _replaying(service, 0.0 if polls is None else SOON_S),
        ),
        Users(settings.local_users),
        frame_s=settings.header_timeout_s,
        send_s=settings.send_timeout_s,
    )
    service.metrics.watch_local(lambda: local.connections, lambda: memory.nbytes, lambda: device_memory.nbytes)
    return local


def _replaying(service: Service, poll_s: float) -> Replaying | None:
    """What answers recurring requests; None where each request is logged or may be traced."""
    services = service.requests
    if services.is_logged or services.traces is not None:
        return None
    return Replaying(services, service.layers, service.keys, poll_s=poll_s)
