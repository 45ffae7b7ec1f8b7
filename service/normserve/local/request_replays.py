"""Recurring requests that are answered by a replayer, without Python code for each.

A request is learned once it has been answered by Python code and its launch has been captured.  From then on the
same frame on the same connection leads to the same launch and the same response, until something changes that the
checks of a request depend on: then all requests are removed, and learned again from later ones.
"""

import asyncio
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace

from msgspec import Raw

from normserve.admission.keys import Keyring, KeyScope
from normserve.backends.replay_interface import (
    FAILED,
    LEFT,
    RECEIVED,
    UNSENT,
    CapturedLaunch,
    Event,
    LaunchReplayer,
    Sample,
)
from normserve.errors import ClientLeftError, NormserveError
from normserve.jobs.job import NormJob
from normserve.layers.registry import LayerRegistry
from normserve.local.local_responder import LocalResponder
from normserve.local.operation_planner import ComputeRequest
from normserve.metrics.request_metrics import CLIENT_LEFT, RequestRecord, RequestTimes
from normserve.requests.request_lifecycle import RequestServices

# The event loop's other callbacks wait so long for a replayer that has something to do all the time.
_TURN_S = 0.5e-3

# The duration of launches of some hundred MiB; a device that takes longer is polled less often.
_WATCHED_S = 2e-3
_PAUSE_S = 0.5e-3

# Requests are launched on arrival, so only a very short deadline can pass before.
_SHORTEST_TIMEOUT_MS = 20.0

# The replayer limits how many frames it has learned, and not their bytes.
_LONGEST_FRAME = 2048

# It takes about a millisecond, which one request in so many waits for.
_COLLECTED_AT_ONCE = 1024

_INFER = frozenset([KeyScope.INFER])


@dataclass(frozen=True, slots=True)
class _ReplayedRequest:
    """The data of a request whose repetitions the replayer (C code) answers.  They are needed for metrics and
    permits, and keep the captured launch alive.

    Attributes:
        record: that of the request that Python code answered.
        captured_launch: keeps the memory of the launch.
    """

    record: RequestRecord
    job: NormJob
    captured_launch: CapturedLaunch
    permit_bytes: int


class RequestReplays:
    """The requests that a native replayer (C code) answers without Python when they are repeated, for all
    connections.  Only the event loop's thread may use this object.
    """

    def __init__(
        self,
        services: RequestServices,
        layers: LayerRegistry,
        keys: Keyring | None,
        *,
        poll_s: float,
    ) -> None:
        """Args:
        keys: None where the server requires no key.
        poll_s: seconds to poll for a request that may follow a response closely.
        """
        self._engine, self._admission_budget, self._layers, self._keyring = (
            services.engine,
            services.admission_budget,
            layers,
            keys,
        )
        # For requests that are not answered in the turn in which they arrived.
        self._request_progress, self._metrics = services.request_progress, services.metrics
        self._timeout_ms, self._poll_s = services.timeout_ms, poll_s
        self._replayer: LaunchReplayer | None = None
        self._is_replayer_made = False
        self._selector_descriptor = -1
        # By the descriptors of the connections that are received through the replayer.
        self._responders: dict[int, LocalResponder] = {}
        self._last_version = self._get_version()
        # Launches that were in flight after the last turn, and their bytes; and when one was last seen to end.
        self._pending_launches = self._pending_bytes = 0
        self._last_completion = 0.0
        self._is_scheduled = False

    def try_add_replay(
        self,
        request: ComputeRequest,
        encoded_results: Raw,
        job: NormJob,
        record: RequestRecord,
        admitted_bytes: int,
        responder: LocalResponder,
    ) -> None:
        """Let the replayer answer later frames with the same bytes on this connection.  It replays the request's
        captured launch.

        Nothing is done if its launch was not captured, its frame is long, its layer has changed, its timeout is
        short,
        the client's permission may end, or the backend has no replayer.

        Args:
            encoded_results: the encoded results of the response.
            job, record: the job and the record of the request.
            admitted_bytes: the bytes of the request's permit.
        """
        if (
            job.replay_slot is None
            or request.frame_content is None
            or (replay := self._engine.get_captured_launch(job.replay_slot)) is None
            or len(request.frame_content) > _LONGEST_FRAME
        ):
            return
        is_as_it_was = (
            responder.is_open
            and responder.session.has_lasting_permission(_INFER)
            and self._has_same_layer(request, job)
        )
        if (
            not is_as_it_was
            or self._has_short_timeout(request)
            or (replayer := self._get_or_make_replayer()) is None
        ):
            return
        self._remove_on_change()
        assert responder.frame_socket is not None
        descriptor = responder.frame_socket.descriptor
        if descriptor not in self._responders:
            responder.frame_socket.attach_replayer(replayer)
            self._responders[descriptor] = responder
        replayer.add_replay(
            descriptor,
            request.frame_content,
            replay.graph,
            replay.stream,
            replay.part_events,
            bytes(encoded_results),
            record.kernel_bytes,
            admitted_bytes,
            _ReplayedRequest(record, job, replay, admitted_bytes),
        )

    def remove_replays(self, responder: LocalResponder) -> None:
        """Stop the replayer's answers on a connection that has ended, or whose client has freed memory that replays
        may use.
        """
        if (
            responder.frame_socket is None
            or self._responders.get(descriptor := responder.frame_socket.descriptor) is not responder
        ):
            return
        if not responder.is_open:
            del self._responders[descriptor]
        elif self._replayer is not None:
            self._replayer.remove_replays(descriptor)
        # Samples that were not collected keep the memory of their launches.
        self.collect_samples()

    def collect_samples(self) -> None:
        """Fetch the timings of requests that the replayer has answered.  Count these requests in the metrics and
        the admission budget.
        """
        if self._replayer is None:
            return
        for learned, samples in self._replayer.take_samples():
            assert isinstance(learned, _ReplayedRequest)
            self._admission_budget.record_unpermitted_release(len(samples), len(samples) * learned.permit_bytes)
            self._metrics.observe_replays(learned.record, _compute_stage_and_total_durations(samples), learned.job)

    def _has_same_layer(self, request: ComputeRequest, job: NormJob) -> bool:
        """Return whether the layer name in the request still refers to the layer that the job used."""
        assert request.operation is not None
        if request.operation.layer is None:
            return True
        try:
            return self._layers.resolve(job.spec.op, request.operation.layer) is job.layer
        except NormserveError:
            return False

    def _has_short_timeout(self, request: ComputeRequest) -> bool:
        """Return whether the request's timeout is so short that it could pass before the launch.  The replayer
        checks no timeouts.
        """
        assert request.operation is not None
        timeout_ms = self._timeout_ms if request.operation.timeout_ms is None else request.operation.timeout_ms
        return timeout_ms < _SHORTEST_TIMEOUT_MS

    def _get_or_make_replayer(self) -> LaunchReplayer | None:
        """Return the replayer, or None if the backend has none.  The first call makes the replayer, because the
        backend can make one only after its start.
        """
        if not self._is_replayer_made:
            self._is_replayer_made = True
            self._replayer = self._engine.make_replayer()
            if self._replayer is not None:
                loop = asyncio.get_running_loop()
                # Only asyncio's own loops have one; another ready descriptor ends a turn.
                selector = getattr(loop, "_selector", None)
                self._selector_descriptor = -1 if selector is None else selector.fileno()
                loop.add_reader(self._replayer.fileno(), self._run_replayer_turn)
                self._metrics.set_replay_collector(self.collect_samples)
        return self._replayer

    def _get_version(self) -> Hashable:
        """Return a value that changes whenever a layer or an API key of the server changes."""
        return self._layers.version, None if self._keyring is None else self._keyring.version

    def _remove_on_change(self) -> None:
        """Remove the replays of all connections if a layer or an API key has changed since the last call."""
        if self._last_version != (versions := self._get_version()):
            self._last_version = versions
            if self._replayer is not None:
                self._replayer.remove_all_replays()
                self.collect_samples()

    def _run_replayer_turn(self) -> None:
        """Let the replayer receive and answer requests for a short time, then handle its events.  While launches
        are pending, the next turn is scheduled.
        """
        replayer = self._replayer
        assert replayer is not None
        self._remove_on_change()
        room = self._admission_budget.admissible_capacity
        events = replayer.serve(*room, self._engine.can_replay, self._poll_s, self._selector_descriptor, _TURN_S)
        launches, nbytes, samples = replayer.count_all()
        self._update_pending(launches, nbytes)
        if samples >= _COLLECTED_AT_ONCE:
            self.collect_samples()
        # Unsent bytes of a response first: frames received in this turn may be answered at once.
        for event in sorted(events, key=_rank_unsent_first):
            self._handle_event(event)
        if launches and not self._is_scheduled:
            self._is_scheduled = True
            is_slow = time.perf_counter() - self._last_completion > _WATCHED_S
            asyncio.get_running_loop().call_later(_PAUSE_S if is_slow else 0.0, self._run_scheduled)

    def _run_scheduled(self) -> None:
        """Run the turn that was scheduled because launches were pending."""
        self._is_scheduled = False
        self._run_replayer_turn()

    def _update_pending(self, launches: int, nbytes: int) -> None:
        """Adjust the admission budget and the progress counter to the replayer's launches in flight and their
        bytes.
        """
        if launches != self._pending_launches or not launches:
            self._last_completion = time.perf_counter()
        self._admission_budget.adjust_unpermitted(launches - self._pending_launches, nbytes - self._pending_bytes)
        for _ in range(self._pending_launches, launches):
            self._request_progress.begin_work()
        for _ in range(launches, self._pending_launches):
            self._request_progress.end_work()
        self._pending_launches, self._pending_bytes = launches, nbytes

    def _handle_event(self, event: Event) -> None:
        """Handle an event of the replayer, the C code that answers repeated requests.  The event is a client that
        left, a frame that Python must answer, bytes that Python must send, or a failed launch.
        """
        kind, descriptor, tag, code, payload = event
        if kind == LEFT:
            self._metrics.observe_request(_make_failed_record(payload, CLIENT_LEFT, ClientLeftError.code))
            return
        answers = self._responders.get(descriptor)
        if answers is None or answers.frame_socket is None:
            return
        if kind == RECEIVED:
            answers.frame_socket.handle_bytes(payload)
        elif kind == UNSENT:
            answers.frame_socket.send_frame(payload)
        elif kind == FAILED:
            error = self._engine.record_failed_replay(code)
            answers.respond_error(tag, error, _make_failed_record(payload, 0, None))
            # The device may still write to memory that the client reuses once it has a response.
            answers.close_connection()


def _rank_unsent_first(event: Event) -> bool:
    """Return the sort key of a replayer's event: False, which is first, for unsent bytes; True for all others."""
    return event[0] != UNSENT


def _make_failed_record(learned: _ReplayedRequest, status: int, error: str | None) -> RequestRecord:
    """Make the metrics record of a replayed request that failed or whose client left.  It is a copy of the original
    request's record, with this status and error and without durations.
    """
    began = time.perf_counter()
    return replace(
        learned.record, status=status, error_code=error, stage_seconds={}, current_stage="send", began_at=began
    )


def _compute_stage_and_total_durations(samples: list[Sample]) -> RequestTimes:
    """Compute the stage durations and total durations of replayed requests, in seconds, from the replayer's
    samples.
    """
    received, launched, copy_in, kernel, copy_out, answering, ended = zip(*samples, strict=True)
    none = [0.0] * len(samples)
    stages = {
        "recv": none,
        "parse": [each - before for before, each in zip(received, launched, strict=True)],
        "queue": none,
        "copy_in": copy_in,
        "kernel": kernel,
        "copy_out": copy_out,
        "resume": [
            max(0.0, end - sum(spans))
            for end, *spans in zip(answering, launched, copy_in, kernel, copy_out, strict=True)
        ],
        "send": [each - before for before, each in zip(answering, ended, strict=True)],
    }
    return RequestTimes(stages, [each - before for before, each in zip(received, ended, strict=True)])
