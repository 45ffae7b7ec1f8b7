"""The operations of one client in progress, from their admission to their response."""

import functools
import time
from collections.abc import Callable
from typing import Any

from normserve.admission.keys import KeyScope
from normserve.admission.permits import Permit
from normserve.codec import local_frames as frames
from normserve.errors import DeviceFailureError, DrainingError, NormserveError
from normserve.jobs.job import NormJob, NormResult
from normserve.local.answers import Answers
from normserve.local.arena import Arena
from normserve.local.operations import Request, answered
from normserve.local.service import Service
from normserve.local.session import Session
from normserve.metrics.requests import RequestRecord

_INFER = frozenset([KeyScope.INFER])


class Computations:
    """Those of one connection.

    Attributes:
        jobs: each with its tag.
    """

    def __init__(
        self, service: Service, session: Session, arena: Arena, answers: Answers, on_end: Callable[[], None]
    ) -> None:
        """Args: on_end: called once an operation is over, before it is answered."""
        self._service = service
        self._session = session
        self._arena = arena
        self._answers = answers
        self._on_end = on_end
        self.jobs: dict[NormJob, int] = {}

    def begin(self, tag: int, request: Request, record: RequestRecord, request_id: str) -> None:
        """Have an operation run; it is answered, now or later, whatever becomes of it."""
        if self._service.polling is not None:
            self._service.polling.note_received()
        self._guarded(_Asked(tag, request, record, request_id), self._run)

    def withdraw(self, tag: int) -> None:
        """The client does not want what it asked for under this tag, if that waits still."""
        for job in [job for job, other in self.jobs.items() if other == tag]:
            self._service.operations.engine.withdraw(job)

    def abandon(self) -> None:
        """The client is gone: what waits is refused; what runs keeps its permit until the device is done."""
        for job in tuple(self.jobs):
            self._service.operations.engine.withdraw(job)

    def _run(self, asked: "_Asked") -> None:
        """Have an operation run; it is answered from the engine's own callback, without a task that waits."""
        operations = self._service.operations
        caller = self._session.authorise(_INFER, asked.record)
        job, deadline, permit = operations.admit(asked.request, self._arena, caller, asked.record)
        try:
            operations.engine.begin(job, deadline, functools.partial(self._guarded, asked, self._conclude))
        except BaseException:
            permit.release()
            raise
        self._service.progress.begin()
        self.jobs[job] = asked.tag
        asked.job, asked.permit = job, permit

    def _conclude(self, asked: "_Asked", ended: NormResult | NormserveError) -> None:
        service, answers = self._service, self._answers
        assert asked.job is not None
        assert asked.permit is not None
        del self.jobs[asked.job]
        service.operations.engine.end(asked.job)
        service.progress.end()
        nbytes = asked.permit.nbytes
        asked.permit.release()
        if isinstance(ended, DrainingError | DeviceFailureError):
            # It may run still, and would write where the client, once it has an answer, keeps something else.
            answers.close()
        self._on_end()
        tag, record, request_id = asked.tag, asked.record, asked.request_id
        if isinstance(ended, NormserveError):
            # Not raised: its traceback would hold this frame, and with it the job.
            answers.note_failure(ended, record, request_id)
            answers.refuse(tag, ended, record, request_id)
            return
        began = time.perf_counter()
        frame = frames.write(tag, answered(asked.request, ended, request_id, record, began))
        record.stages["serialize"] = time.perf_counter() - began
        record.status = 200
        record.waiting_in = "send"
        answers.send(frame)
        answers.account(record, request_id)
        message = asked.request.message
        # What it lies in may have been given back meanwhile.
        if service.replaying is not None and self._arena.has(
            [*message.tensors.values(), *message.results.values()]
        ):
            service.replaying.learn(asked.request, asked.job, record, nbytes, answers, self._session)
        if service.polling is not None:
            service.polling.note_sent()

    def _guarded(self, asked: "_Asked", work: Callable[..., None], *arguments: Any) -> None:
        """Do something for a request that answers it, now or later; refuse it if that goes wrong."""
        try:
            work(asked, *arguments)
        except NormserveError as error:
            self._answers.refuse(asked.tag, error, asked.record, asked.request_id)
        except Exception as error:
            self._answers.refuse_unexpected(asked.tag, error, asked.record, asked.request_id)


class _Asked:
    """An operation that is to be answered.

    Attributes:
        job, permit: None until it has been admitted.
    """

    __slots__ = ("job", "permit", "record", "request", "request_id", "tag")

    def __init__(self, tag: int, request: Request, record: RequestRecord, request_id: str) -> None:
        self.tag = tag
        self.request = request
        self.record = record
        self.request_id = request_id
        self.job: NormJob | None = None
        self.permit: Permit | None = None
