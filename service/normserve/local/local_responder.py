"""The messages of one client: the response to each, and its accounting."""

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from normserve.codec import local_messages as frames
from normserve.codec.local_messages import LocalResponse
from normserve.errors import ClientLeftError, NormserveError, RetryLaterError
from normserve.errors.problems import compute_retry_after_s, make_problem_document
from normserve.jobs.job import NormJob, NormResult
from normserve.local.frame_socket import FrameSocket
from normserve.local.local_session import LocalSession
from normserve.metrics.request_metrics import NONE, RequestRecord
from normserve.requests.request_lifecycle import CallbackRequest, RequestServices

if TYPE_CHECKING:
    from normserve.traces.request_tracer import Attributes

_names = random.Random()
_NO_HEADERS: Mapping[bytes, bytes] = {}


class LocalResponder:
    """The object through which all responses of one connection are sent.

    Attributes:
        frame_socket: None until the connection is served.
    """

    def __init__(self, services: RequestServices, session: LocalSession) -> None:
        self.services = services
        self.session = session
        self.frame_socket: FrameSocket | None = None

    @property
    def is_open(self) -> bool:
        """Whether responses can still be sent."""
        return self.frame_socket is not None and self.frame_socket.is_open

    @property
    def pending_replays(self) -> int:
        """Number of requests that the replayer has received but not yet answered."""
        return 0 if self.frame_socket is None else self.frame_socket.pending_replays

    def close_connection(self) -> None:
        """Close the connection."""
        if self.frame_socket is not None:
            self.frame_socket.close()

    def send_frame(
        self, frame: bytes, owned_descriptors: tuple[int, ...] = (), on_lost: Callable[[], None] | None = None
    ) -> None:
        """Send a response, or queue it until the client reads.  The arguments are those of
        `FrameSocket.send_frame`.
        """
        assert self.frame_socket is not None
        self.frame_socket.send_frame(frame, owned_descriptors, on_lost)

    def respond_error(self, tag: int, error: NormserveError, record: RequestRecord) -> None:
        """Answer a message with an error, and count it in the metrics and the access log."""
        LocalExchange(self, tag, record).respond_error(error)


class LocalExchange(CallbackRequest):
    """One message of a client on the same host, its response, and its entry in metrics and logs.

    Attributes:
        tag: of the message, and of its response.
    """

    # Spans are of operations.
    is_traced = False

    def __init__(
        self, answers: LocalResponder, tag: int, record: RequestRecord, headers: Mapping[bytes, bytes] = _NO_HEADERS
    ) -> None:
        # Ids are no secrets, so the system's random source, a system call for each id, is not needed.
        request_id = f"{_names.getrandbits(128):032x}"
        super().__init__(answers.services, request_id, headers, answers.session.client_identity, record)
        self.tag = tag
        self._responder = answers

    def send_result(self, result: NormResult, job: NormJob) -> None:
        """Raise an AssertionError: only operations have results, and `LocalComputation` sends those."""
        raise AssertionError("only operations have results")

    def send_problem(self, error: NormserveError) -> None:
        """Send an error as a problem document, and finish the message."""
        answer = LocalResponse(
            status=self.record.status,
            request_id=self.request_id,
            problem=make_problem_document(error, self.request_id),
        )
        if isinstance(error, RetryLaterError):
            answer.retry_after_s = compute_retry_after_s(error)
        self._responder.send_frame(frames.encode_frame(self.tag, answer))
        self.finish_message()

    def finish_message(self) -> None:
        """Finish the request after its response: release its permit, and record it in metrics, traces and logs."""
        is_client_disconnected = self.record.error_code == ClientLeftError.code or not self._responder.is_open
        self.finish_request(is_delivered=not is_client_disconnected)

    def describe_span(self) -> "tuple[str, Attributes]":
        """Return the name and the attributes of the message's trace span."""
        attributes: Attributes = {
            "network.transport": "unix",
            "client.address": self.client_identity.address,
            "normserve.request_id": self.request_id,
            "normserve.status": self.record.status,
        }
        return f"local {self.record.op}", attributes

    def describe_log_target(self) -> tuple[str, str]:
        """Return the transport and the operation, which stand in the access log for method and path."""
        record = self.record
        return record.transport, record.op if record.direction == NONE else f"{record.op}/{record.direction}"
