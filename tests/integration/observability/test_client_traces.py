"""The server's spans are children of the span in which a client of ours called it."""

import asyncio
import contextlib

import httpx
import numpy as np
import pytest
from normserve.client import AsyncClient, Client
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from tests.integration.harness.collector import SOON, collecting

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@contextlib.contextmanager
def inside_a_span():
    context = SpanContext(
        int(TRACE, 16), int(PARENT, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
    with use_span(NonRecordingSpan(context)):
        yield


@pytest.mark.parametrize("protocol", ["http", "httpx", "local"])
@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
def test_clients_propagate_the_current_span(launched, tmp_path, until, protocol, kind):
    x = np.ones((2, 16), np.float32)

    def call_blocking(url, **options):
        with Client(url, **options) as client:
            client.layer_norm(x)
            with inside_a_span():
                # Over shared memory the second one is sent in another way.
                client.layer_norm(x)
                client.rms_norm(x)
            client.layer_norm(x)

    async def call_asynchronous(url, **options):
        async with AsyncClient(url, **options) as client:
            await client.layer_norm(x)
            with inside_a_span():
                await client.layer_norm(x)
                await client.rms_norm(x)
            await client.layer_norm(x)

    with collecting() as collector:
        path = tmp_path / "local"
        server = launched("--trace-endpoint", collector.url, "--trace-ratio", "0", "--local", str(path), env=SOON)
        url = f"unix://{path}" if protocol == "local" else server.url
        transports = {"blocking": httpx.HTTPTransport, "asynchronous": httpx.AsyncHTTPTransport}
        options = {"transport": transports[kind]()} if protocol == "httpx" else {}
        if kind == "blocking":
            call_blocking(url, **options)
        else:
            asyncio.run(call_asynchronous(url, **options))
        names = [f"{'local ' if protocol == 'local' else 'POST /v1/'}{op}" for op in ("layer_norm", "rms_norm")]
        until(lambda: all(collector.named(name) for name in names))
        spans = [span for name in names for span in collector.named(name)]
        assert [(span.trace_id, span.parent_id) for span in spans] == [(TRACE, PARENT)] * 2
