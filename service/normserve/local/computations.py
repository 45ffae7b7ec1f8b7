"""The operations of one client in progress, from their admission to their response."""

import time
from collections.abc import Callable

from normserve.admission.keys import KeyScope
from normserve.codec import local_messages as frames
from normserve.errors import DeviceFailureError, DrainingError, NormserveError
from normserve.jobs.job import NormJob, NormResult
from normserve.local.local_responder import LocalExchange, LocalResponder
from normserve.local.local_services import LocalServices
from normserve.local.operation_planner import ComputeRequest, RequestPlan, make_response
from normserve.local.segment_table import SegmentTable
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.prepared_calls import PreparedCallCache

_INFER = frozenset([KeyScope.INFER])


class ConnectionComputations:
    """The operations of one connection in progress.

    Attributes:
        services, segment_table, responder: the services, memory and responses of the connection.
        prepared_calls: the connection's prepared calls.
        on_end: called when an operation has ended, before its response is sent.
        in_progress: the operations that were submitted to the engine.
    """

    def __init__(
        self,
        service: LocalServices,
        arena: SegmentTable,
        prepared: PreparedCallCache,
        answers: LocalResponder,
        on_end: Callable[[], None],
    ) -> None:
        self.services = service
        self.segment_table = arena
        self.prepared_calls = prepared
        self.responder = answers
        self.on_end = on_end
        self.in_progress: set[LocalComputation] = set()

    def begin_computation(self, tag: int, request: ComputeRequest, record: RequestRecord) -> None:
        """Start an operation, which is answered in any case, now or later."""
        if self.services.busy_poller is not None:
            self.services.busy_poller.record_received()
        LocalComputation(self, tag, request, record).begin_computation()

    def cancel_computation(self, tag: int) -> None:
        """Cancel the operation with this tag if it is still queued."""
        for each in [each for each in self.in_progress if each.tag == tag]:
            each.cancel_job()

    def cancel_all(self) -> None:
        """Cancel all queued operations of a client that has left; a running one keeps its permit until it ends."""
        for each in tuple(self.in_progress):
            each.cancel_job()


class LocalComputation(LocalExchange):
    """One operation, answered from the engine's callback without a task that waits."""

    is_traced = True
    _plan: RequestPlan

    def __init__(
        self, computations: ConnectionComputations, tag: int, request: ComputeRequest, record: RequestRecord
    ) -> None:
        super().__init__(computations.responder, tag, record, request.headers)
        self._computations = computations
        self._request = request

    def begin_computation(self) -> None:
        """Check and submit the operation, or refuse it."""
        computations = self._computations
        service = computations.services
        try:
            self._responder.session.authorise(_INFER, self)
            plan, layer = service.operation_planner.plan_request(
                self._request, computations.segment_table, computations.prepared_calls, self.record
            )
            self._plan = plan
            self.acquire_permit(plan.tensor_bytes)
            job = plan.make_job(layer)
            self.charge_memory(job, plan.cost, plan.tensor_bytes)
            self.record.received_bytes = plan.tensor_bytes
            if job.is_on_device:
                self.record.transport = "local_cuda"
            assert self._request.operation is not None
            self.submit_job(job, self._request.operation.timeout_ms)
        except Exception as error:
            self.respond_error(error)
        else:
            computations.in_progress.add(self)

    def conclude_job(self, ended: NormResult | NormserveError, job: NormJob) -> None:
        self._computations.in_progress.discard(self)
        assert self.permit is not None
        # Before others are begun: the client has the memory.
        self.permit.release()
        if isinstance(ended, DrainingError | DeviceFailureError):
            # The job may still run, and would write to memory that the client reuses once it has a response.
            self._responder.close_connection()
        self._computations.on_end()
        super().conclude_job(ended, job)

    def send_result(self, result: NormResult, job: NormJob) -> None:
        request, plan, record, service = self._request, self._plan, self.record, self._computations.services
        began = time.perf_counter()
        frame = frames.encode_frame(self.tag, make_response(plan, result, self.request_id, record, began))
        record.stage_seconds["serialize"] = time.perf_counter() - began
        record.status = 200
        record.current_stage = "send"
        self._responder.send_frame(frame)
        self.finish_message()
        message = request.message
        # The client may have freed the segments meanwhile.
        if service.request_replays is not None and self._computations.segment_table.has_segments(
            [*message.tensors.values(), *message.results.values()]
        ):
            assert self.permit is not None
            service.request_replays.add_replay(
                request, plan.encoded_results, job, record, self.permit.nbytes, self._responder
            )
        if service.busy_poller is not None:
            service.busy_poller.record_sent()
