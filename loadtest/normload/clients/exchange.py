"""A request in flight."""

from dataclasses import dataclass

from normserve.client.http.socket_steps import Steps
from normserve.client.responses.api_response import ApiResponse

from normload.clients.http_connection import HttpLoadConnection
from normload.clients.local_connection import LocalLoadConnection
from normload.load.schedules import ScheduledRequest

AnyConnection = HttpLoadConnection | LocalLoadConnection


@dataclass(slots=True)
class SentRequest:
    """A request in flight, or ended.

    Attributes:
        connection: the one it uses.
        scheduled: the request, and its scheduled time.
        free_at, sent_at, ended_at: when the connection was free, and the request was sent and ended, by the clock.
        is_checked: whether the response is compared with the expected one.
        steps: the remaining steps.
        descriptor: the one that it waits for.
        response: the response.
        code: as in `Record`; "" if it follows from the response.
    """

    connection: AnyConnection
    scheduled: ScheduledRequest
    free_at: float
    sent_at: float
    is_checked: bool
    steps: Steps[ApiResponse]
    descriptor: int = -1
    ended_at: float = 0.0
    response: ApiResponse | None = None
    code: str = ""
