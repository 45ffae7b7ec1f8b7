"""Recurring requests that are answered by a replayer, without Python code for each.

A request is learned once it has been answered by Python code and its launch has been captured.  From then on the
same frame on the same connection leads to the same launch and the same answer, until something changes that the
checks of a request depend on: then everything is forgotten, and learned again from the next requests.
"""

import asyncio
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace

from msgspec import Raw

from normserve.admission.keys import Keyring, KeyScope
from normserve.backends.replayer import (
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
from normserve.local.answers import LocalResponder
from normserve.local.operations import ComputeRequest
from normserve.metrics.requests import CLIENT_LEFT, RequestRecord, RequestTimes
from normserve.requests.lifecycle import RequestServices

# The event loop's other callbacks wait so long for a replayer that has something to do all the time.
_TURN_S = 0.5e-3

# What launches of some hundred MiB take; a device that takes longer is looked at less often.
_WATCHED_S = 2e-3
_PAUSE_S = 0.5e-3

# They are launched as they come, so that no deadline but the shortest can pass before.
_SHORTEST_TIMEOUT_MS = 20.0

# The replayer limits how many frames it has learned, and not their bytes.
_LONGEST_FRAME = 2048

# It takes about a millisecond, which one request in so many waits for.
_COLLECTED_AT_ONCE = 1024

_INFER = frozenset([KeyScope.INFER])


@dataclass(frozen=True, slots=True)
class _ReplayedRequest:
    """What is kept of a request.

    Attributes:
        record: of the one that was answered by Python code.
        replay: keeps the memory of its launch.
    """

    record: RequestRecord
    job: NormJob
    replay: CapturedLaunch
    admitted_bytes: int


class RequestReplays:
    """Those of all connections.  Belongs to the event loop's thread."""

    def __init__(
        self,
        services: RequestServices,
        layers: LayerRegistry,
        keys: Keyring | None,
        *,
        poll_s: float,
    ) -> None:
        """Args:
        keys: None where no key is asked for.
        poll_s: for so long to poll for a request that follows an answer closely.
        """
        self._engine, self._limits, self._layers, self._keys = services.engine, services.limits, layers, keys
        # Of requests that are not answered in the turn in which they came.
        self._progress, self._metrics = services.progress, services.metrics
        self._timeout_ms, self._poll_s = services.timeout_ms, poll_s
        self._replayer: LaunchReplayer | None = None
        self._is_begun = False
        self._others = -1
        # By the descriptors of the connections that are received through the replayer.
        self._answers: dict[int, LocalResponder] = {}
        self._versions = self._version()
        # Launches that were in flight after the last turn, and their bytes; and when one was last seen to end.
        self._flights = self._bytes = 0
        self._moved = 0.0
        self._is_due = False

    def learn(
        self,
        request: ComputeRequest,
        described: Raw,
        job: NormJob,
        record: RequestRecord,
        admitted_bytes: int,
        answers: LocalResponder,
    ) -> None:
        """Have a request that was answered replayed when it comes again, if that can be.

        Args:
            described: its results, as the answer said them.
            job, record: what came of it.
            admitted_bytes: that its permit counted.
        """
        if (
            job.recurrence is None
            or request.content is None
            or (replay := self._engine.replay(job.recurrence)) is None
            or len(request.content) > _LONGEST_FRAME
        ):
            return
        is_as_it_was = answers.is_open and answers.session.may_always(_INFER) and self._has_its_layer(request, job)
        if not is_as_it_was or self._is_hurried(request) or (replayer := self._begun()) is None:
            return
        self._note_version()
        assert answers.wire is not None
        descriptor = answers.wire.descriptor
        if descriptor not in self._answers:
            answers.wire.receive_through(replayer)
            self._answers[descriptor] = answers
        replayer.learn(
            descriptor,
            request.content,
            replay.graph,
            replay.stream,
            replay.marks,
            bytes(described),
            record.kernel_bytes,
            admitted_bytes,
            _ReplayedRequest(record, job, replay, admitted_bytes),
        )

    def forget(self, answers: LocalResponder) -> None:
        """A connection has ended, or has given memory back that its requests may use."""
        if answers.wire is None or self._answers.get(descriptor := answers.wire.descriptor) is not answers:
            return
        if not answers.is_open:
            del self._answers[descriptor]
        elif self._replayer is not None:
            self._replayer.forget(descriptor)
        # What has not been counted keeps the memory of its launch.
        self.collect()

    def collect(self) -> None:
        """Count what has been answered."""
        if self._replayer is None:
            return
        for learned, samples in self._replayer.samples():
            assert isinstance(learned, _ReplayedRequest)
            self._limits.note_departure(len(samples), len(samples) * learned.admitted_bytes)
            self._metrics.observe_replays(learned.record, _make_times(samples), learned.job)

    def _has_its_layer(self, request: ComputeRequest, job: NormJob) -> bool:
        """Whether the layer that the request names is the one that it was computed with."""
        assert request.asked is not None
        if request.asked.layer is None:
            return True
        try:
            return self._layers.named(job.spec.op, request.asked.layer) is job.layer
        except NormserveError:
            return False

    def _is_hurried(self, request: ComputeRequest) -> bool:
        assert request.asked is not None
        timeout_ms = self._timeout_ms if request.asked.timeout_ms is None else request.asked.timeout_ms
        return timeout_ms < _SHORTEST_TIMEOUT_MS

    def _begun(self) -> LaunchReplayer | None:
        """The replayer; made when it is first needed, since the backend has one only once it has started."""
        if not self._is_begun:
            self._is_begun = True
            self._replayer = self._engine.make_replayer()
            if self._replayer is not None:
                loop = asyncio.get_running_loop()
                # Of asyncio's own loops; what else is ready ends a turn.
                selector = getattr(loop, "_selector", None)
                self._others = -1 if selector is None else selector.fileno()
                loop.add_reader(self._replayer.fileno(), self._serve)
                self._metrics.watch_replays(self.collect)
        return self._replayer

    def _version(self) -> Hashable:
        """Another value after each change of what requests are checked against."""
        return self._layers.version, None if self._keys is None else self._keys.version

    def _note_version(self) -> None:
        if self._versions != (versions := self._version()):
            self._versions = versions
            if self._replayer is not None:
                self._replayer.forget_all()
                self.collect()

    def _serve(self) -> None:
        """Let the replayer have a turn."""
        replayer = self._replayer
        assert replayer is not None
        self._note_version()
        room = self._limits.room
        events = replayer.serve(*room, self._engine.may_replay, self._poll_s, self._others, _TURN_S)
        flights, nbytes, samples = replayer.state()
        self._note_flights(flights, nbytes)
        if samples >= _COLLECTED_AT_ONCE:
            self.collect()
        # The rest of an answer first: what came in the same turn may be answered at once.
        for event in sorted(events, key=_is_not_unsent):
            self._conclude(event)
        if flights and not self._is_due:
            self._is_due = True
            is_slow = time.perf_counter() - self._moved > _WATCHED_S
            asyncio.get_running_loop().call_later(_PAUSE_S if is_slow else 0.0, self._serve_again)

    def _serve_again(self) -> None:
        self._is_due = False
        self._serve()

    def _note_flights(self, flights: int, nbytes: int) -> None:
        if flights != self._flights or not flights:
            self._moved = time.perf_counter()
        self._limits.hold(flights - self._flights, nbytes - self._bytes)
        for _ in range(self._flights, flights):
            self._progress.begin()
        for _ in range(flights, self._flights):
            self._progress.end()
        self._flights, self._bytes = flights, nbytes

    def _conclude(self, event: Event) -> None:
        kind, descriptor, tag, code, said = event
        if kind == LEFT:
            self._metrics.observe_request(_make_record(said, CLIENT_LEFT, ClientLeftError.code))
            return
        answers = self._answers.get(descriptor)
        if answers is None or answers.wire is None:
            return
        if kind == RECEIVED:
            answers.wire.take(said)
        elif kind == UNSENT:
            answers.wire.send(said)
        elif kind == FAILED:
            error = self._engine.note_failed_replay(code)
            answers.refuse(tag, error, _make_record(said, 0, None))
            # The device may still write where the client, once it has an answer, keeps something else.
            answers.close()


def _is_not_unsent(event: Event) -> bool:
    return event[0] != UNSENT


def _make_record(learned: _ReplayedRequest, status: int, error: str | None) -> RequestRecord:
    """Of a request that has no result."""
    began = time.perf_counter()
    return replace(learned.record, status=status, error=error, stages={}, waiting_in="send", began=began)


def _make_times(samples: list[Sample]) -> RequestTimes:
    received, launched, copy_in, kernel, copy_out, answering, ended = zip(*samples, strict=True)
    none = [0.0] * len(samples)
    stages = {
        "recv": none,
        "parse": [each - before for before, each in zip(received, launched, strict=True)],
        "queue": none,
        "copy_in": copy_in,
        "kernel": kernel,
        "copy_out": copy_out,
        "send": [each - before for before, each in zip(answering, ended, strict=True)],
    }
    return RequestTimes(stages, [each - before for before, each in zip(received, ended, strict=True)])
