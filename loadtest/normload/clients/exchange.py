"""A request in flight."""

from dataclasses import dataclass

from normserve.client.answers.answer import Answer
from normserve.client.http.steps import Steps

from normload.clients.connection import Connection
from normload.clients.local_connection import LocalConnection
from normload.load.arrivals import Slot

AnyConnection = Connection | LocalConnection


@dataclass(slots=True)
class Exchange:
    """A request under way, or ended.

    Attributes:
        connection: that it is on.
        slot: the request, and its scheduled time.
        free, sent, ended: by the clock.
        check: whether the answer is compared with the right one.
        steps: what is left to do.
        descriptor: that it waits for.
        answer: what came.
        code: as in `Record`; "" of an answer whose status says it.
    """

    connection: AnyConnection
    slot: Slot
    free: float
    sent: float
    check: bool
    steps: Steps[Answer]
    descriptor: int = -1
    ended: float = 0.0
    answer: Answer | None = None
    code: str = ""
