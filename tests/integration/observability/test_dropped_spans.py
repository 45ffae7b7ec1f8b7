"""Spans that a collector does not get are counted."""

import asyncio
from collections import Counter

from normserve.metrics.requests import RequestRecord
from normserve.traces.export import export_to

from tests.integration.harness.collector import SOON, collecting
from tests.integration.harness.wire import post

DROPPED = "normserve_trace_spans_dropped_total"


def dropped(http, reason):
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f'{DROPPED}{{reason="{reason}"}}'))


def test_a_server_counts_what_its_collector_refuses(launched, until):
    with collecting() as collector:
        server = launched("--trace-endpoint", collector.url, "--trace-ratio", "1", env=SOON)
        with server.client() as http:
            post(http)
            until(lambda: collector.spans)
            assert dropped(http, "export_failed") == dropped(http, "queue_full") == 0
            collector.status = 400
            post(http)
            until(lambda: dropped(http, "export_failed") > 0)
            assert dropped(http, "queue_full") == 0


def test_spans_beyond_the_queue_and_of_refused_batches_are_counted(monkeypatch, until):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    count = Counter()

    def observe(reason, spans):
        count[reason] += spans

    with collecting() as collector:
        collector.status = 400
        collector.hang()
        traces = export_to(collector.url, 1.0, observe)

        def trace(requests):
            for _ in range(requests):
                traces.end(RequestRecord(status=404), {}, lambda: ("GET", {}))

        trace(1)
        until(lambda: collector.paths)
        trace(4)
        assert not count
        trace(2)
        assert count == {"queue_full": 2}
        collector.resume()
        until(lambda: count["export_failed"] == 5)
        assert count["queue_full"] == 2
        asyncio.run(traces.close(2.0))
