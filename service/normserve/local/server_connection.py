"""The server's side of one client's connection: its messages, its arena, and its operations in progress."""

import asyncio
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from normserve.admission.keys import KeyScope
from normserve.codec import local_messages as frames
from normserve.codec.local_messages import LocalResponse, Message
from normserve.errors import DeviceFailureError, DrainingError, MalformedPayloadError, NormserveError
from normserve.jobs.job import NormJob, NormResult
from normserve.local.client_segments import ChargedDeviceSegment, ChargedSegment, ClientSegment
from normserve.local.frame_socket import FrameSocket
from normserve.local.layer_messages import MessageOrigin
from normserve.local.local_responder import LocalExchange, LocalResponder
from normserve.local.local_services import LocalServices
from normserve.local.local_session import LocalSession, PeerProcess
from normserve.local.operation_planner import ComputeRequest, RequestPlan, make_response_and_complete_record
from normserve.local.segment_table import SegmentTable
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.prepared_calls import PreparedCallCache

#: Requests of one connection that are handled at the same time; further frames stay in the operating system's
#: buffers.
MOST_UNDER_WAY = 64

# Memory for a connection's prepared calls: about a thousand frames of one message with one tensor.  A model of
# fifty norms sends a hundred in each step, each with one of a few ranges for its results.
_PREPARED_BYTES = 8 * 2**20

# A prepared call takes less than this: for each message its plan, and for each byte of a frame the objects that are
# made from it, with those of the CPU backend.  Measured of one to seventeen tensors and of sixteen messages.
_BYTES_PER_MESSAGE, _BYTES_PER_BYTE = 3 * 2**9, 30

_ANY = frozenset(KeyScope)

_INFER = frozenset([KeyScope.INFER])

_UNANSWERED = (frames.CancelRequestMessage, frames.FreeSegmentMessage)

ParsedMessage = Message | ComputeRequest


class LocalServerConnection:
    """The server's side of one connection: it parses messages, answers them, and keeps the client's segments.

    Attributes:
        peer: the process of the client.
        on_closed: called when the connection has ended, with the segments that the client has not freed.
    """

    def __init__(
        self, service: LocalServices, peer: PeerProcess, key_name: str | None, watch: Callable[[], int | None]
    ) -> None:
        """Args:
        key_name: name of the API key that is used for the peer's user.
        watch: opens a descriptor that is readable once the peer has ended, while the connection is open; None
            where the operating system offers none.
        """
        self._services = service
        self._open_exit_descriptor = watch
        self.peer = peer
        self.on_closed: Callable[[list[ClientSegment]], None] = (
            service.orphaned_segments.submit_segments_for_freeing
        )
        self._session = LocalSession(peer.uid, key_name, service.key_authorisation)
        self._segment_table = SegmentTable()
        # Freed segments of device memory, which are charged until the client's process has ended.
        self._returned_segments: list[ChargedDeviceSegment] = []
        self._queued_messages: deque[tuple[int, ParsedMessage, float, float]] = deque()
        # By frames: clients send the same few repeatedly.
        counters = service.request_services.metrics.get_prepared_call_counters("connection")
        self._prepared_calls = PreparedCallCache(_PREPARED_BYTES, counters)
        self._tasks: set[asyncio.Task[None]] = set()
        self._responder = LocalResponder(service.request_services, self._session)
        self._computations = ConnectionComputations(
            service, self._segment_table, self._prepared_calls, self._responder, self._on_request_end
        )

    @property
    def is_busy(self) -> bool:
        """Whether requests of the connection are in progress."""
        return bool(self._tasks or self._computations.in_progress or self._responder.pending_replays)

    def start(self, wire: FrameSocket) -> None:
        """Start to receive and answer messages from a socket."""
        self._responder.frame_socket = wire
        wire.set_receiving(wanted=True)

    def close(self) -> None:
        """Close the connection."""
        self._responder.close_connection()

    def on_frame(self, first_tag: int, content: bytes, began: float, ended: float) -> None:
        """Answer the messages of a frame, or queue them while too many are in progress.  The first message has
        `first_tag`, each later one the next tag.
        """
        messages: Sequence[ParsedMessage] | None = self._prepared_calls.find(content)
        if messages is None:
            try:
                messages = self._parse_frame(content)
            except MalformedPayloadError as error:
                self._responder.respond_error(first_tag, error, RequestRecord(transport="local", began_at=began))
                return
        if len(messages) == 1 and not self._queued_messages and self._has_free_slot:
            self._begin_message(first_tag, messages[0], began, ended)
            return
        for index, message in enumerate(messages):
            self._queued_messages.append(((first_tag + index) % frames.TAGS, message, began, ended))
        self._begin_queued()

    def _parse_frame(self, content: bytes) -> Sequence[ParsedMessage]:
        """Decode the messages of a frame.  A frame of untraced operations is cached, because clients repeat such
        frames.
        """
        parsed = [
            ComputeRequest(each) if isinstance(each, frames.ComputeMessage) else each
            for each in frames.decode_messages(content)
        ]
        # Only operations are sent repeatedly, and of these none that names a span.
        if all(isinstance(each, ComputeRequest) and not each.headers for each in parsed):
            self._prepared_calls.try_store(
                content, parsed, _BYTES_PER_MESSAGE * len(parsed) + _BYTES_PER_BYTE * len(content)
            )
            if isinstance(first := parsed[0], ComputeRequest) and len(parsed) == 1:
                first.frame_content = content
        return parsed

    def on_fault(self, error: NormserveError) -> None:
        """Answer with the error and close, because the start of the next frame is unknown."""
        self._responder.respond_error(0, error, RequestRecord(transport="local"))
        self.close()

    def on_end(self) -> None:
        """Clean up after the client has left: drop queued messages, cancel operations, and release its segments."""
        self._queued_messages.clear()
        self._discard_calls_and_replays()
        self._computations.cancel_all()
        self.on_closed(self._remove_all_segments())

    def _remove_all_segments(self) -> list[ClientSegment]:
        """Remove all segments from this connection, and return them so that they can be kept or freed."""
        segments: list[ClientSegment] = [
            *map(_get_segment, self._segment_table.segments.values()),
            *self._returned_segments,
        ]
        # Cleared in place: an allocation in progress may return a reused segment to this list.
        self._returned_segments.clear()
        self._segment_table.segments.clear()
        return segments

    def _begin_queued(self) -> None:
        """Start queued messages while fewer than the maximum are in progress; receive more only once none is
        queued.
        """
        while self._queued_messages and self._has_free_slot:
            self._begin_message(*self._queued_messages.popleft())
        wire = self._responder.frame_socket
        if wire is not None:
            wire.set_receiving(wanted=not self._queued_messages)

    def _on_request_end(self) -> None:
        """Start queued messages, since a request has ended."""
        if self._queued_messages:
            self._begin_queued()

    @property
    def _has_free_slot(self) -> bool:
        """Whether another request may be started now."""
        return len(self._tasks) + len(self._computations.in_progress) < MOST_UNDER_WAY

    def _begin_message(self, tag: int, message: ParsedMessage, began: float, ended: float) -> None:
        """Start to handle a message.  An operation is submitted as a job.  A cancellation or freed segment is
        handled at once, any other message in a task.  `began` and `ended` are the times when its frame began and
        ended to be received.
        """
        if isinstance(message, _UNANSWERED):
            self._handle_unanswered_message(message)
            return
        record = RequestRecord(transport="local", stage_seconds={"recv": ended - began}, began_at=began)
        if isinstance(message, ComputeRequest):
            self._computations.begin_computation(tag, message, record)
            return
        exchange = LocalExchange(self._responder, tag, record)
        task = asyncio.get_running_loop().create_task(self._handle_message(message, exchange))
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Forget an ended task, and start queued messages."""
        self._tasks.discard(task)
        self._on_request_end()

    def _handle_unanswered_message(self, message: frames.CancelRequestMessage | frames.FreeSegmentMessage) -> None:
        """Cancel an operation or remove a segment; such messages have no response.  An unknown tag or segment
        number is ignored.
        """
        if isinstance(message, frames.FreeSegmentMessage):
            self._remove_segment_and_clear_caches(message.segment)
            return
        self._computations.cancel_computation(message.request)

    def _remove_segment_and_clear_caches(self, number: int | None) -> None:
        """Remove a segment that the client has freed or never received.  Host memory is freed; device memory
        stays charged until the client's process ends.
        """
        memory = None if number is None else self._segment_table.segments.pop(number, None)
        # Cached calls may refer to the segment, and would keep it mapped.
        self._discard_calls_and_replays()
        if memory is not None:
            segment = _get_segment(memory)
            if isinstance(segment, ChargedDeviceSegment):
                self._returned_segments.append(segment)
            else:
                self._services.orphaned_segments.submit_segments_for_freeing([segment])

    def _discard_calls_and_replays(self) -> None:
        """Discard cached messages and replays, which may refer to freed memory."""
        self._prepared_calls.clear()
        if self._services.request_replays is not None:
            self._services.request_replays.remove_replays(self._responder)

    async def _handle_message(self, message: Message, exchange: LocalExchange) -> None:
        """Answer one message that is not an operation, with an error if it fails, and account for it."""
        try:
            await self._send_response(message, exchange)
        except Exception as error:
            exchange.respond_error(error)
        else:
            exchange.finish_message()

    async def _send_response(self, message: Message, exchange: LocalExchange) -> None:
        """Compute and send the response to a hello, segment, info or layer message."""
        record = exchange.record
        descriptors: tuple[int, ...] = ()
        on_lost: Callable[[], None] | None = None
        answer = LocalResponse(status=200, request_id=exchange.request_id)
        match message:
            case frames.HelloMessage():
                record.op = "hello"
                answer.document = self._session.store_hello_and_make_response(
                    message, self._describe_device_memory()
                )
                exchange.client_identity = self._session.client_identity
            case frames.GrowArenaMessage():
                record.op = "grow"
                self._session.authorise(_ANY, exchange)
                descriptors = (await self._allocate_or_retain_segment(message, answer),)
                on_lost = functools.partial(self._remove_segment_and_clear_caches, answer.segment)
            case frames.GetInfoMessage():
                record.op = "info"
                self._session.authorise(_ANY, exchange)
                answer.document = await self._services.describe_server()
            case _:
                record.op = "layers"
                sender = MessageOrigin(self._segment_table, self._session, exchange)
                answer.document, answer.status = await self._services.layer_messages.handle_message(message, sender)
        record.status = answer.status
        self._responder.send_frame(frames.encode_frame(exchange.tag, answer), descriptors, on_lost)

    def _describe_device_memory(self) -> dict[str, Any]:
        """Return the hello response's entry about device memory; {} until the server is ready."""
        service = self._services
        if service.request_services.engine.device_description is None:
            return {}
        return {"device": service.device_allocator.describe_device()}

    async def _allocate_or_retain_segment(self, message: frames.GrowArenaMessage, answer: LocalResponse) -> int:
        """Allocate the requested segment, write its number into `answer`, and return its descriptor for the
        client.  If the connection ends meanwhile, the segment is kept until the client's process ends.
        """
        service = self._services
        service.request_services.engine.require_ready()
        # If the connection ends meanwhile, its peer can no longer be found.
        watch = self._open_exit_descriptor()
        try:
            return await self._allocate_and_add_segment(message, answer)
        finally:
            if self._responder.is_open:
                if watch is not None:
                    os.close(watch)
            else:
                self._remove_segment_and_clear_caches(answer.segment)
                service.orphaned_segments.retain_segments(self.peer.pid, watch, self._remove_all_segments())

    async def _allocate_and_add_segment(self, message: frames.GrowArenaMessage, answer: LocalResponse) -> int:
        """Allocate host or device memory as requested, add it to the connection's segments, and return its
        descriptor.
        """
        service = self._services
        segment: ChargedSegment | ChargedDeviceSegment
        if message.memory == "device":
            lend = service.device_allocator.allocate_segment(
                self.peer,
                message.nbytes,
                self._returned_segments,
                service.orphaned_segments,
                self._list_own_segments(),
            )
            descriptor, segment = await lend
            answer.device, answer.nbytes = segment.device.uuid, len(segment)
            memory = segment.view()
        else:
            # Segments that this client has just freed must not count.
            await service.orphaned_segments.wait_freed()
            descriptor, segment = await service.host_allocator.allocate_segment(
                self.peer.uid, message.nbytes, self._list_own_segments()
            )
            memory = memoryview(segment)
        answer.segment = self._segment_table.add_segment(memory)
        return descriptor

    def _list_own_segments(self) -> list[ClientSegment]:
        """List the segments that only this client can free: this connection's, and those that are kept until the
        client's process ends.
        """
        orphans = self._services.orphaned_segments.find_segments(self.peer.pid) if self.peer.pid else []
        return [*map(_get_segment, self._segment_table.segments.values()), *self._returned_segments, *orphans]


def _get_segment(memory: memoryview) -> ChargedSegment | ChargedDeviceSegment:
    """Return the segment object that owns the memory of a view."""
    segment = memory.obj
    assert isinstance(segment, ChargedSegment | ChargedDeviceSegment)
    return segment


class ConnectionComputations:
    """The operations of one connection that are in progress, and the objects that they share.

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
        """Start an operation.  The client gets a result or an error in any case, now or later."""
        if self.services.busy_poller is not None:
            self.services.busy_poller.record_received()
        LocalComputation(self, tag, request, record).begin_computation()

    def cancel_computation(self, tag: int) -> None:
        """Cancel the operation with this tag if its job is still queued; a running job ends normally."""
        for each in [each for each in self.in_progress if each.tag == tag]:
            each.cancel_job()

    def cancel_all(self) -> None:
        """Cancel the queued operations of a client that has left.  A running one keeps its permit until it ends."""
        for each in tuple(self.in_progress):
            each.cancel_job()


class LocalComputation(LocalExchange):
    """One operation of a client on the same host.  The response is sent from the engine's callback, and no task
    waits for the operation.
    """

    is_traced = True
    _plan: RequestPlan

    def __init__(
        self, computations: ConnectionComputations, tag: int, request: ComputeRequest, record: RequestRecord
    ) -> None:
        super().__init__(computations.responder, tag, record, request.headers)
        self._computations = computations
        self._request = request

    def begin_computation(self) -> None:
        """Check the operation and submit its job to the engine; send an error if either fails."""
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
        """Release the permit, start queued messages, and send the job's result or error.  If the server ends or
        the device failed, the connection is closed instead, because the job may still write to the client's
        memory.
        """
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
        """Send the response for a result.  Then let the replayer answer repetitions of the request, unless the
        client has freed the request's memory.
        """
        request, plan, record, service = self._request, self._plan, self.record, self._computations.services
        began = time.perf_counter()
        frame = frames.encode_frame(
            self.tag, make_response_and_complete_record(plan, result, self.request_id, record, began)
        )
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
            service.request_replays.try_add_replay(
                request, plan.encoded_results, job, record, self.permit.nbytes, self._responder
            )
        if service.busy_poller is not None:
            service.busy_poller.record_sent()
