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
    """A request in flight, or ended.

    Attributes:
        connection: the one it uses.
        slot: the request, and its scheduled time.
        free, sent, ended: when the connection was free, and the request was sent and ended, by the clock.
        check: whether the response is compared with the expected one.
        steps: the remaining steps.
        descriptor: the one that it waits for.
        answer: the response.
        code: as in `Record`; "" if it follows from the response.
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
