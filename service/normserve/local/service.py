"""The objects that connections use."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normserve.engine.polling import BusyPoller
from normserve.local.device import DeviceSegmentAllocator
from normserve.local.layers import LayerMessageDispatcher
from normserve.local.memory import HostSegmentAllocator, OrphanedSegments
from normserve.local.operations import OperationPlanner
from normserve.requests.authorisation import KeyAuthorisation
from normserve.requests.lifecycle import RequestServices

if TYPE_CHECKING:
    # It uses answers, which are made of this.
    from normserve.local.replaying import RequestReplays


@dataclass(frozen=True, slots=True)
class LocalServices:
    """What connections work with.

    Attributes:
        key_authorisation: None where no key is asked for.
        busy_poller: None where the event loop sleeps between requests.
        request_replays: answers requests that recur; None where all are answered by Python code.
        orphaned_segments: segments of connections that have ended.
        describe_server: what `/v1/info` answers.
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
