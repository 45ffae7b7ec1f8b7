"""The objects that all connections use."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normserve.engine.busy_polling import BusyPoller
from normserve.local.client_segments import DeviceSegmentAllocator, HostSegmentAllocator, OrphanedSegments
from normserve.local.layer_messages import LayerMessageDispatcher
from normserve.local.operation_planner import OperationPlanner
from normserve.requests.key_authorisation import KeyAuthorisation
from normserve.requests.request_lifecycle import RequestServices

if TYPE_CHECKING:
    # Imports only for types, because the import would be circular.
    from normserve.local.request_replays import RequestReplays


@dataclass(frozen=True, slots=True)
class LocalServices:
    """The objects that all connections of clients on the same host share.

    Attributes:
        key_authorisation: None where the server requires no key.
        busy_poller: None where the event loop sleeps between requests.
        request_replays: the replayed requests; None where Python code answers all requests.
        orphaned_segments: segments of connections that have ended.
        describe_server: returns the document of `/v1/info`.
    """

    request_services: RequestServices
    operation_planner: OperationPlanner
    layer_messages: LayerMessageDispatcher
    key_authorisation: KeyAuthorisation | None
    host_allocator: HostSegmentAllocator
    device_allocator: DeviceSegmentAllocator
    orphaned_segments: OrphanedSegments
    describe_server: Callable[[], Awaitable[dict[str, Any]]]
    busy_poller: BusyPoller | None = None
    request_replays: "RequestReplays | None" = None
