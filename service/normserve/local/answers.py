"""What one client is answered, and the account of it."""

import logging
import random

from normserve.codec import local_frames as frames
from normserve.codec.local_frames import Answer
from normserve.errors import ClientLeftError, NormserveError, RetryLaterError
from normserve.local import access_log
from normserve.local.service import Service
from normserve.local.session import Session
from normserve.local.wire import Wire
from normserve.metrics.requests import CLIENT_LEFT, RequestRecord
from normserve.problems import document, retry_after, status_of, unexpected

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
        """Whether anybody may read them."""
        return self.wire is not None and self.wire.is_open

    def close(self) -> None:
        """End the connection from this side."""
        if self.wire is not None:
            self.wire.close()

    def send(self, frame: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send an answer; descriptors that go with it are closed then."""
        assert self.wire is not None
        self.wire.send(frame, descriptors)

    def refuse(self, tag: int, error: NormserveError, record: RequestRecord, request_id: str) -> None:
        """Answer a message with an error, and account for it."""
        record.error = error.code
        record.status = status_of(error)
        answer = Answer(status=record.status, request_id=request_id, problem=document(error, request_id))
        if isinstance(error, RetryLaterError):
            answer.retry_after_s = retry_after(error)
        self.send(frames.write(tag, answer))
        self.account(record, request_id)

    def refuse_unexpected(self, tag: int, error: BaseException, record: RequestRecord, request_id: str) -> None:
        """As `refuse`, of an error that is the server's own; the log says which."""
        fields = {"request_id": request_id, "key": self._session.caller.key}
        log.error("a request met an error that nobody expected", exc_info=error, extra={"fields": fields})
        self.refuse(tag, unexpected(error), record, request_id)

    def account(self, record: RequestRecord, request_id: str) -> None:
        """Count a message that has been answered."""
        if record.error == ClientLeftError.code or not self.is_open:
            record.status = CLIENT_LEFT
        self._service.metrics.observe_request(record)
        if self._service.is_logged:
            access_log.note(record, self._session.caller, request_id)


def new_request_id() -> str:
    """A name for a request."""
    # Names, no secrets: the system's source of those takes a call for each.
    return f"{_names.getrandbits(128):032x}"
