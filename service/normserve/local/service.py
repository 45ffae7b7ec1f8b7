"""The objects that connections use."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normserve.engine.polling import Polling
from normserve.local.device import DeviceArenas
from normserve.local.layers import LayerMessages
from normserve.local.memory import Leftovers, SharedMemory
from normserve.local.operations import Operations
from normserve.requests.authorisation import Authorisation
from normserve.requests.lifecycle import RequestServices

if TYPE_CHECKING:
    # It uses answers, which are made of this.
    from normserve.local.replaying import Replaying


@dataclass(frozen=True, slots=True)
class Service:
    """What connections work with.

    Attributes:
        authorisation: None where no key is asked for.
        polling: None where the event loop sleeps between requests.
        replaying: answers requests that recur; None where all are answered by Python code.
        leftovers: segments of connections that have ended.
        describe: what `/v1/info` answers.
    """

    requests: RequestServices
    operations: Operations
    layers: LayerMessages
    authorisation: Authorisation | None
    memory: SharedMemory
    device_memory: DeviceArenas
    leftovers: Leftovers
    describe: Callable[[], Awaitable[dict[str, Any]]]
    polling: Polling | None = None
    replaying: "Replaying | None" = None
