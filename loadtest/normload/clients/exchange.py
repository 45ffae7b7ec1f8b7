"""A request in flight."""

from dataclasses import dataclass

from normserve.client.answers.answer import ApiResponse
from normserve.client.http.steps import Steps

from normload.clients.connection import HttpLoadConnection
from normload.clients.local_connection import LocalLoadConnection
from normload.load.arrivals import ScheduledRequest

AnyConnection = HttpLoadConnection | LocalLoadConnection


@dataclass(slots=True)
class SentRequest:
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
    slot: ScheduledRequest
    free: float
    sent: float
    check: bool
    steps: Steps[ApiResponse]
    descriptor: int = -1
    ended: float = 0.0
    answer: ApiResponse | None = None
    code: str = ""
