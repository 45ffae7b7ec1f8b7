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
        authorisation: None where no key is asked for.
        polling: None where the event loop sleeps between requests.
        replaying: answers requests that recur; None where all are answered by Python code.
        leftovers: segments of connections that have ended.
        describe: what `/v1/info` answers.
    """

    requests: RequestServices
    operations: OperationPlanner
    layers: LayerMessageDispatcher
    authorisation: KeyAuthorisation | None
    memory: HostSegmentAllocator
    device_memory: DeviceSegmentAllocator
    leftovers: OrphanedSegments
    describe: Callable[[], Awaitable[dict[str, Any]]]
    polling: BusyPoller | None = None
    replaying: "RequestReplays | None" = None
