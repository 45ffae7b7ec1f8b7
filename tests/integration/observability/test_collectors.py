"""Collectors that fail: requests are answered all the same, and the spans that are lost are counted and logged."""

import asyncio
import time
from collections import Counter

import pytest
from normserve.metrics.request_metrics import RequestRecord
from normserve.traces.export import make_exporting_tracer

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
        traces = make_exporting_tracer(collector.url, 1.0, observe)

        def trace(requests):
            for _ in range(requests):
                traces.end_span_if_sampled(RequestRecord(status=404), {}, lambda: ("GET", {}))

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


@pytest.mark.parametrize("fault", ["down", "hangs", "refuses"])
def test_a_collector_that_fails_hurts_nobody(start_server, until, fault):
    with collecting() as collector:
        if fault == "refuses":
            collector.status = 503
        elif fault == "hangs":
            collector.hang()
        url = "http://127.0.0.1:9" if fault == "down" else collector.url
        server = start_server("--trace-endpoint", url, "--trace-ratio", "1", env=SOON)
        with server.client() as http:
            for _ in range(50):
                assert post(http).status_code == 200
            if fault != "down":
                until(lambda: collector.paths)
            assert post(http).status_code == 200
        began = time.monotonic()
        server.terminate()
        assert server.wait() == 0
        # The last traces have two seconds of the drain.
        assert time.monotonic() - began < 10
        assert "Traceback" not in server.log
        assert "opentelemetry" not in server.log


def test_it_says_when_a_collector_begins_to_fail_and_when_it_is_back(start_server, until):
    with collecting() as collector:
        collector.status = 400
        server = start_server("--trace-endpoint", collector.url, "--trace-ratio", "1", env=SOON)
        with server.client() as http:
            post(http)
            until(lambda: "accepts no traces" in server.log)
            collector.status = 200
            until(lambda: post(http).status_code == 200 and "accepts traces again" in server.log)
        assert server.log.count("accepts no traces") == 1
