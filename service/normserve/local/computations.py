"""The operations of one client in progress, from their admission to their response."""

import time
from collections.abc import Callable

from normserve.admission.keys import KeyScope
from normserve.codec import local_frames as frames
from normserve.errors import DeviceFailureError, DrainingError, NormserveError
from normserve.jobs.job import NormJob, NormResult
from normserve.local.answers import LocalExchange, LocalResponder
from normserve.local.arena import SegmentTable
from normserve.local.operations import ComputeRequest, RequestPlan, make_response
from normserve.local.service import LocalServices
from normserve.metrics.requests import RequestRecord
from normserve.requests.prepared_calls import PreparedCallCache

_INFER = frozenset([KeyScope.INFER])


class ConnectionComputations:
    """Those of one connection.

    Attributes:
        service, arena, answers: what they are computed with, from where, and how they are answered.
        prepared: the connection's prepared calls.
        on_end: called once an operation is over, before it is answered.
        under_way: those that the engine has.
    """

    def __init__(
        self,
        service: LocalServices,
        arena: SegmentTable,
        prepared: PreparedCallCache,
        answers: LocalResponder,
        on_end: Callable[[], None],
    ) -> None:
        self.service = service
        self.arena = arena
        self.prepared = prepared
        self.answers = answers
        self.on_end = on_end
        self.under_way: set[LocalComputation] = set()

    def begin(self, tag: int, request: ComputeRequest, record: RequestRecord) -> None:
        """Have an operation run; it is answered, now or later, whatever becomes of it."""
        if self.service.polling is not None:
            self.service.polling.note_received()
        LocalComputation(self, tag, request, record).begin()

    def withdraw(self, tag: int) -> None:
        """The client does not want what it asked for under this tag, if that waits still."""
        for each in [each for each in self.under_way if each.tag == tag]:
            each.withdraw()

    def abandon(self) -> None:
        """The client is gone: what waits is refused; what runs keeps its permit until the device is done."""
        for each in tuple(self.under_way):
            each.withdraw()


class LocalComputation(LocalExchange):
    """One operation, which is answered from the engine's own callback, without a task that waits."""

    is_traced = True
    _plan: RequestPlan

    def __init__(
        self, computations: ConnectionComputations, tag: int, request: ComputeRequest, record: RequestRecord
    ) -> None:
        super().__init__(computations.answers, tag, record, request.headers)
        self._computations = computations
        self._request = request

    def begin(self) -> None:
        """Check and begin the operation, or refuse it."""
        computations = self._computations
        service = computations.service
        try:
            self._answers.session.authorise(_INFER, self)
            plan, layer = service.operations.plan(
                self._request, computations.arena, computations.prepared, self.record
            )
            self._plan = plan
            self.acquire_permit(plan.nbytes)
            job = plan.job(layer)
            self.charge_memory(job, plan.cost, plan.nbytes)
            self.record.received = plan.nbytes
            if job.is_on_device:
                self.record.transport = "local_cuda"
            assert self._request.asked is not None
            self.begin_job(job, self._request.asked.timeout_ms)
        except Exception as error:
            self.refuse(error)
        else:
            computations.under_way.add(self)

    def conclude(self, ended: NormResult | NormserveError, job: NormJob) -> None:
        self._computations.under_way.discard(self)
        assert self.permit is not None
        # Before others are begun: the client has the memory.
        self.permit.release()
        if isinstance(ended, DrainingError | DeviceFailureError):
            # It may run still, and would write where the client, once it has an answer, keeps something else.
            self._answers.close()
        self._computations.on_end()
        super().conclude(ended, job)

    def send_result(self, result: NormResult, job: NormJob) -> None:
        request, plan, record, service = self._request, self._plan, self.record, self._computations.service
        began = time.perf_counter()
        frame = frames.encode_frame(self.tag, make_response(plan, result, self.request_id, record, began))
        record.stages["serialize"] = time.perf_counter() - began
        record.status = 200
        record.waiting_in = "send"
        self._answers.send(frame)
        self.end()
        message = request.message
        # What it lies in may have been given back meanwhile.
        if service.replaying is not None and self._computations.arena.has(
            [*message.tensors.values(), *message.results.values()]
        ):
            assert self.permit is not None
            service.replaying.learn(request, plan.described, job, record, self.permit.nbytes, self._answers)
        if service.polling is not None:
            service.polling.note_sent()
