"""The current span of OpenTelemetry, as requests carry it."""

import sys
from types import ModuleType

import msgspec
import numpy as np
import pytest
from normserve.client.local.call_messages import add_traceparent
from normserve.client.trace_context import get_current_headers, get_current_traceparent
from normserve.codec import local_messages as frames
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, use_span

from .harness.fake_server import FakeServer

X = np.zeros((2, 2), np.float32)
TRACEPARENT = "00-0000000000000000000000000000000a-000000000000000b-01"
COMPUTE = frames.ComputeMessage("layer_norm", {}, {})


def span(trace_id=10, *, sampled=True, state=None):
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return use_span(NonRecordingSpan(SpanContext(trace_id, 11, False, flags, state)))


def test_requests_carry_the_current_span(connect):
    server = FakeServer()
    client = connect(server)
    with span(state=TraceState([("vendor", "1")])):
        client.layer_norm(X)
    assert server.request.headers["traceparent"] == TRACEPARENT
    assert server.request.headers["tracestate"] == "vendor=1"
    client.layer_norm(X)
    assert not {"traceparent", "tracestate"} & set(server.request.headers)


def test_a_span_that_is_not_sampled_says_so():
    with span(sampled=False):
        assert get_current_headers() == [("traceparent", TRACEPARENT[:-2] + "00")]


def test_an_invalid_span_is_not_propagated():
    with span(trace_id=0):
        assert get_current_headers() == []


@pytest.mark.parametrize("module", [None, ModuleType("opentelemetry.trace")], ids=["absent", "half imported"])
def test_a_program_without_opentelemetry_has_no_span(monkeypatch, module):
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    if module is not None:
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)
    assert get_current_traceparent() is None


@pytest.mark.parametrize("message", [COMPUTE, msgspec.Raw(msgspec.json.encode(COMPUTE))], ids=["struct", "encoded"])
def test_messages_of_operations_carry_the_current_span(message):
    assert add_traceparent(message) is message
    with span():
        sent = msgspec.json.decode(msgspec.json.encode(add_traceparent(message)), type=frames.ComputeMessage)
    assert sent == msgspec.structs.replace(COMPUTE, traceparent=TRACEPARENT)


def test_other_messages_carry_none():
    with span():
        assert add_traceparent(frames.GetInfoMessage()) == frames.GetInfoMessage()
