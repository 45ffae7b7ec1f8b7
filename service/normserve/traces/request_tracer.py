"""Spans of requests, of their stages and of launches.

Nothing is done for a request before its end: its record has all times and durations, from which the spans are
created then.  The objects belong to the event loop's thread; processors behind the tracer export spans on their
own threads.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    format_trace_id,
    set_span_in_context,
)

from normserve.metrics.request_metrics import NONE, RequestRecord
from normserve.traces.parent_span import ParentSpan, parse_parent

# A span costs the server about as much time as such a stage takes.
SHORTEST_S = 20e-6

LAUNCH_STAGES = ("copy_in", "kernel", "copy_out")

# Requests of one launch end soon after one another; one that ends later links to the launch, and is not linked to.
_LAUNCH_OPEN_S = 1.0

_NOT_TRACED, _CHOSEN = object(), object()

Attributes = dict[str, str | int | float | bool]

MakeStage = Callable[[SpanContext, str, int, int], None]
"""A function that makes an ended span from its parent, its name, and its begin and end in nanoseconds
since 1970.
"""


class _RequestSpan(NamedTuple):
    """The span of a traced request, and its begin in nanoseconds since 1970."""

    span: Span
    began_ns: int


class RequestTracer:
    """The tracer that decides which requests are traced, and makes spans for requests, their stages and
    shared launches.
    """

    def __init__(
        self, tracer: Tracer, make_stage: MakeStage, ratio: float, shut_down: Callable[[float], None]
    ) -> None:
        """Args:
        make_stage: makes the spans of stages, in less time than the tracer: a request has eight of them.
        ratio: share of requests that are traced of those whose parent is not sampled.
        shut_down: exports the spans that have ended, within the given seconds; later ones are not exported.
        """
        self._tracer = tracer
        self._make_stage = make_stage
        self._ratio = ratio
        self._shut_down = shut_down
        # Spans by the key of their launch, each with its end.
        self._launch_spans: dict[tuple[float, int], tuple[Span, int]] = {}

    def _rule_out_tracing(self, record: RequestRecord, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request is certainly not traced.  If it has no traceparent header, this is decided by
        chance at
        the first call and stored in the record.
        """
        if record.span is None and b"traceparent" not in headers:
            record.span = _NOT_TRACED if random.random() >= self._ratio else _CHOSEN
        return record.span is _NOT_TRACED

    def begin_span_if_sampled(self, record: RequestRecord, headers: Mapping[bytes, bytes]) -> None:
        """Decide whether a request is traced, unless that was decided before, and begin its span if it is.

        Args: headers: the request's, by their lower-case names.
        """
        if self._rule_out_tracing(record, headers) or isinstance(record.span, _RequestSpan):
            return
        parent = parse_parent(headers)
        is_chosen = record.span is _CHOSEN or (parent is not None and parent.is_sampled)
        if not is_chosen and random.random() >= self._ratio:
            record.span = _NOT_TRACED
            return
        # The clock is read only here: even if it is set later, no stage begins before its request.
        began_ns = time.time_ns() - _to_nanoseconds(time.perf_counter() - record.began_at)
        context = Context() if parent is None else _make_context(parent)
        span = self._tracer.start_span("request", context, SpanKind.SERVER, start_time=began_ns)
        if not span.is_recording():
            # The environment may turn the SDK off.
            record.span = _NOT_TRACED
            return
        record.span, record.trace_id = (
            _RequestSpan(span, began_ns),
            format_trace_id(span.get_span_context().trace_id),
        )

    def end_span_if_sampled(
        self, record: RequestRecord, headers: Mapping[bytes, bytes], describe: Callable[[], tuple[str, Attributes]]
    ) -> None:
        """End a traced request's span with its attributes, its stages, and a link to its launch.  Do nothing if
        the request is not traced.

        Args: describe: returns the span's name and the transport's attributes.
        """
        self.begin_span_if_sampled(record, headers)
        traced = record.span
        if not isinstance(traced, _RequestSpan):
            return
        span, ended = traced.span, record.ended_at or time.perf_counter()

        def at(moment: float) -> int:
            return traced.began_ns + _to_nanoseconds(moment - record.began_at)

        name, attributes = describe()
        span.update_name(name)
        span.set_attributes({**attributes, **_make_attributes(record)})
        if record.status >= 500:
            span.set_attribute("error.type", record.error_code or str(record.status))
            span.set_status(Status(StatusCode.ERROR))
        parent = span.get_span_context()
        for stage in compute_stage_intervals(record, ended):
            self._make_stage(parent, stage.name, at(stage.began_at), at(stage.ended_at))
        if record.batch_size > 1:
            self._link_spans(span, self._get_or_begin_launch_span(record, at))
        span.end(at(ended))

    async def close(self, within_s: float) -> None:
        """Export the spans that have ended, in at most `within_s` seconds.  Spans that end later are not
        exported.
        """
        for key in tuple(self._launch_spans):
            self._end_launch_span(key)
        await asyncio.to_thread(self._shut_down, within_s)

    def _link_spans(self, request: Span, launch: Span) -> None:
        """Link a request's span to its launch's span, and the reverse while the launch's span is open."""
        request.add_link(launch.get_span_context())
        if launch.is_recording():
            launch.add_link(request.get_span_context())

    def _get_or_begin_launch_span(self, record: RequestRecord, at: Callable[[float], int]) -> Span:
        """Return the span of the launch in which a request ran together with others, made at the first of these
        requests.  The span is the root of its own trace.
        """
        key = (record.launched_at, record.launch_bytes)
        if key not in self._launch_spans:
            seconds = sum([record.stage_seconds[stage] for stage in LAUNCH_STAGES])
            attributes: Attributes = {
                "normserve.op": record.op,
                "normserve.pass": record.direction,
                "normserve.dtype": record.dtype,
                "normserve.batch_size": record.batch_size,
                "normserve.launch_bytes": record.launch_bytes,
            }
            span = self._tracer.start_span(
                f"launch {record.op}", Context(), attributes=attributes, start_time=at(record.launched_at)
            )
            self._launch_spans[key] = span, at(record.launched_at + seconds)
            asyncio.get_running_loop().call_later(_LAUNCH_OPEN_S, self._end_launch_span, key)
        return self._launch_spans[key][0]

    def _end_launch_span(self, key: tuple[float, int]) -> None:
        """End a launch's span with the time at which the launch ended, if it has not been ended."""
        if (launch := self._launch_spans.pop(key, None)) is not None:
            span, ended_ns = launch
            span.end(ended_ns)


def _make_attributes(record: RequestRecord) -> Attributes:
    """Return the span attributes for a request's record.  No attribute has text that the client can choose, except
    the name of its API key.
    """
    attributes: Attributes = {
        "normserve.op": record.op,
        "normserve.pass": record.direction,
        "normserve.transport": record.transport,
        "normserve.bytes_in": record.received_bytes,
        "normserve.bytes_out": record.sent_bytes,
    }
    if record.rows:
        attributes |= {"normserve.dtype": record.dtype, "normserve.rows": record.rows}
    if record.batch_size:
        attributes |= {
            "normserve.batch_size": record.batch_size,
            "normserve.kernel_bytes": record.kernel_bytes,
            "normserve.launch_bytes": record.launch_bytes,
        }
    if record.key_name is not None:
        attributes["normserve.key"] = record.key_name
    if record.error_code is not None:
        attributes["normserve.error"] = record.error_code
    return attributes


def _make_context(parent: ParentSpan) -> Context:
    """Make the OpenTelemetry context in which a span becomes a child of the client's span."""
    state = TraceState.from_header([parent.state]) if parent.state else None
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    ids = int(parent.trace_id, 16), int(parent.span_id, 16)
    context = SpanContext(*ids, is_remote=True, trace_flags=flags, trace_state=state)
    return set_span_in_context(NonRecordingSpan(context), Context())


def _to_nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class StageInterval(NamedTuple):
    """The name, begin and end of one stage of a request, in seconds by `time.perf_counter`."""

    name: str
    began_at: float
    ended_at: float


def compute_stage_intervals(record: RequestRecord, ended: float) -> list[StageInterval]:
    """Compute begin and end of each stage of a request from its record, in order.  `ended` is the request's end.

    Requests that share a launch each have its full duration.  Stages of a successful request that are shorter than
    `SHORTEST_S` are left out, except for `kernel`.  A refused or aborted operation has all its stages, with the one
    that it was in at its end.
    """
    queue = record.stage_seconds.get("queue", 0.0)
    stages = [
        *_place_consecutively(record, record.began_at, "recv", "relay_in", "parse"),
        *_place_consecutively(record, record.launched_at - queue, "queue", *LAUNCH_STAGES, "resume"),
        *_place_consecutively(record, record.response_began_at, "serialize", "relay_out", "send"),
    ]
    if record.status < 400:
        return [
            stage for stage in stages if stage.name == "kernel" or stage.ended_at - stage.began_at >= SHORTEST_S
        ]
    if record.direction != NONE and record.current_stage not in record.stage_seconds:
        began = stages[-1].ended_at if stages else record.began_at
        stages.append(StageInterval(record.current_stage, began, max(began, ended)))
    return stages


def _place_consecutively(record: RequestRecord, began: float, *names: str) -> Iterator[StageInterval]:
    """Yield an interval for each of these stages that the record has.  The first begins at `began`, each
    other one at the end of the one before.
    """
    for name in names:
        seconds = record.stage_seconds.get(name)
        if seconds is not None:
            yield StageInterval(name, began, began + seconds)
            began += seconds
