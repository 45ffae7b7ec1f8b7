"""The responses to one client, and their records."""

import logging
import random
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from normserve.codec import local_frames as frames
from normserve.codec.local_frames import Answer
from normserve.errors import ClientLeftError, NormserveError, RetryLaterError
from normserve.errors.problems import document, retry_after, status_of, unexpected
from normserve.local import access_log
from normserve.local.service import Service
from normserve.local.session import Session
from normserve.local.wire import Wire
from normserve.logs import failures
from normserve.metrics.requests import CLIENT_LEFT, RequestRecord
from normserve.traces.parent import log_fields

if TYPE_CHECKING:
    from normserve.traces.traces import Attributes

log = logging.getLogger(__name__)

_names = random.Random()


class Answers:
    """Those of one connection.

    Attributes:
        wire: None until the connection is served.
    """

    def __init__(self, service: Service, session: Session) -> None:
        self._service = service
        self._session = session
        self.wire: Wire | None = None

    @property
    def is_open(self) -> bool:
        """Whether they can still be sent."""
        return self.wire is not None and self.wire.is_open

    @property
    def flights(self) -> int:
        """Answers that a replayer will send."""
        return 0 if self.wire is None else self.wire.flights

    def close(self) -> None:
        """End the connection from this side."""
        if self.wire is not None:
            self.wire.close()

    def send(
        self, frame: bytes, descriptors: tuple[int, ...] = (), on_lost: Callable[[], None] | None = None
    ) -> None:
        """Send an answer, as `Wire.send`."""
        assert self.wire is not None
        self.wire.send(frame, descriptors, on_lost)

    def refuse(self, tag: int, error: NormserveError, record: RequestRecord, request_id: str) -> None:
        """Answer a message with an error, and account for it."""
        record.error = error.code
        record.status = status_of(error)
        answer = Answer(status=record.status, request_id=request_id, problem=document(error, request_id))
        if isinstance(error, RetryLaterError):
            answer.retry_after_s = retry_after(error)
        self.send(frames.write(tag, answer))
        self.account(record, request_id)

    def note_failure(self, error: NormserveError, record: RequestRecord, request_id: str) -> None:
        """Log an error that is about to be answered, if it is the server's own."""
        if status_of(error) == HTTPStatus.INTERNAL_SERVER_ERROR:
            failures.note(error.detail, self._log_fields(record, request_id))

    def refuse_unexpected(self, tag: int, error: BaseException, record: RequestRecord, request_id: str) -> None:
        """As `refuse`, of an error that is the server's own; the log says which."""
        fields = self._log_fields(record, request_id)
        log.error("unexpected error in a request", exc_info=error, extra={"fields": fields})
        self.refuse(tag, unexpected(error), record, request_id)

    def account(self, record: RequestRecord, request_id: str) -> None:
        """Count a message that has been answered."""
        if record.error == ClientLeftError.code or not self.is_open:
            record.status = CLIENT_LEFT
        if self._service.traces is not None and record.span is not None:
            self._service.traces.end(record, {}, lambda: self._described(record, request_id))
        self._service.metrics.observe_request(record)
        if self._service.is_logged:
            access_log.note(record, self._session.caller, request_id)

    def _log_fields(self, record: RequestRecord, request_id: str) -> dict[str, str | None]:
        """Which request it is, and whose."""
        return {**log_fields(request_id, record.trace_id, {}), "key": self._session.caller.key}

    def _described(self, record: RequestRecord, request_id: str) -> "tuple[str, Attributes]":
        attributes: Attributes = {
            "network.transport": "unix",
            "client.address": self._session.caller.address,
            "normserve.request_id": request_id,
            "normserve.status": record.status,
        }
        return f"local {record.op}", attributes


def new_request_id() -> str:
    """A name for a request."""
    # Names, no secrets: the system's source of those takes a call for each.
    return f"{_names.getrandbits(128):032x}"
