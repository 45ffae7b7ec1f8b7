"""The objects that connections use."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normserve.admission.keys import Keyring
from normserve.engine.polling import Polling
from normserve.engine.progress import Progress
from normserve.local.device import DeviceArenas
from normserve.local.layers import LayerMessages
from normserve.local.memory import Leftovers, SharedMemory
from normserve.local.operations import Operations
from normserve.logs.audit import Refusals
from normserve.metrics.metrics import Metrics

if TYPE_CHECKING:
    # It uses answers, which are made of this.
    from normserve.local.replaying import Replaying

    # It imports OpenTelemetry, which only those have who ask for traces.
    from normserve.traces.traces import Traces


@dataclass(frozen=True, slots=True)
class Service:
    """What connections work with.

    Attributes:
        keys: None where no key is asked for.
        refusals: is told of messages that were refused for want of a key.
        progress: is told when work begins and ends.
        is_logged: whether the access log has a line for each message.
        traces: where operations are traced.
        polling: None where the event loop sleeps between requests.
        replaying: answers requests that recur; None where all are answered by Python code.
        leftovers: segments of connections that have ended.
        describe: what `/v1/info` answers.
    """

    operations: Operations
    layers: LayerMessages
    keys: Keyring | None
    refusals: Refusals
    metrics: Metrics
    progress: Progress
    memory: SharedMemory
    device_memory: DeviceArenas
    leftovers: Leftovers
    describe: Callable[[], Awaitable[dict[str, Any]]]
    is_logged: bool = False
    traces: "Traces | None" = None
    polling: Polling | None = None
    replaying: "Replaying | None" = None
