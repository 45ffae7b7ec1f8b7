"""What a collector is sent, and that a server needs none."""

import itertools
import json
import os
import re
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from normserve.metrics.request_metrics import STAGES
from normserve.traces.request_tracer import SHORTEST_S
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.integration.harness.collector import SOON, Collector, collecting
from tests.integration.harness.local_wire import LocalConnection
from tests.integration.harness.stage import stage_on
from tests.integration.harness.wire import npy, packed, post
from tests.integration.observability.load import IMAGES

SERVER, INTERNAL = 2, 1
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture(scope="module")
def collector():
    with collecting() as there:
        yield there


@pytest.fixture(scope="module")
def traced(launched, collector):
    """A server that traces what it is asked to."""
    with launched("--trace-endpoint", collector.url, "--trace-ratio", "0", env=SOON).client() as http:
        yield http


@pytest.fixture
def span_of(collector, until):
    """The span of a request, once it and its stages have come."""

    def find(answer: httpx.Response, among: Collector = collector):
        until(lambda: among.of_request(answer.headers["x-request-id"]) is not None)
        return among.of_request(answer.headers["x-request-id"])

    return find


def test_a_request_is_a_child_of_its_clients_span(traced, collector, span_of):
    answer = post(traced, traceparent=SAMPLED, tracestate="vendor=1", user_agent="me/1")
    span = span_of(answer)
    assert (span.name, span.kind) == ("POST /v1/layer_norm", SERVER)
    assert (span.trace_id, span.parent_id, span.state) == (TRACE, PARENT, "vendor=1")
    assert not span.is_failed
    sent = len(answer.request.content)
    said = {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/layer_norm",
        "http.request.body.size": sent,
        "http.response.body.size": len(answer.content),
        "url.path": "/v1/layer_norm",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "client.address": "127.0.0.1",
        "user_agent.original": "me/1",
        "normserve.op": "layer_norm",
        "normserve.pass": "forward",
        "normserve.transport": "tcp",
        "normserve.dtype": "float32",
        "normserve.rows": 2,
        "normserve.bytes_in": sent,
        "normserve.bytes_out": len(answer.content),
        "normserve.batch_size": 1,
        "normserve.kernel_bytes": int(answer.headers["x-kernel-bytes"]),
    }
    assert said.items() <= span.attributes.items()
    assert span.resource["service.name"] == "normserve"
    assert span.resource["process.pid"] != os.getpid()


def test_stages_lie_one_behind_the_other_within_their_request(traced, collector, span_of):
    before = time.time_ns()
    answer = post(traced, content=npy(np.ones((512, 1024), np.float32)), traceparent=SAMPLED)
    after = time.time_ns()
    span = span_of(answer)
    stages = collector.children(span)
    names = [stage.name for stage in stages]
    assert names == [name for name in STAGES if name in names]
    assert "kernel" in names
    assert {stage.trace_id for stage in stages} == {TRACE}
    assert {stage.kind for stage in stages} == {INTERNAL}
    assert before < span.began < span.ended
    # The last byte may be with the client before the server knows.
    assert stages[-2].ended < after
    timing = {
        name: float(milliseconds)
        for name, milliseconds in (part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    }
    assert {name for name, milliseconds in timing.items() if milliseconds >= 1000 * SHORTEST_S} <= set(names)
    for stage in stages:
        assert stage.name == "kernel" or stage.ended - stage.began >= 1e9 * SHORTEST_S - 1
        assert span.began <= stage.began <= stage.ended <= span.ended
        if stage.name in timing:
            assert (stage.ended - stage.began) / 1e6 == pytest.approx(timing[stage.name], abs=0.001)
    for earlier, later in itertools.pairwise(stages):
        # Rounded to nanoseconds one by one.
        assert earlier.ended <= later.began + 2


def test_a_trace_of_a_front_end_ends_with_its_last_stage(launched, span_of):
    with collecting() as there:
        options = ("--frontends", "1", "--trace-endpoint", there.url, "--trace-ratio", "0")
        with launched(*options, env=SOON).client() as http:
            answer = post(http, content=npy(np.ones((1024, 1024), np.float32)), traceparent=SAMPLED)
            span = span_of(answer, there)
        stages = there.children(span)
        names = [stage.name for stage in stages]
        assert names == [name for name in STAGES if name in names]
        assert {"relay_in", "relay_out"} <= set(names)
        # Rounded to nanoseconds one by one.
        assert names[-1] == "send"
        assert span.ended == pytest.approx(stages[-1].ended, rel=0, abs=2)


@pytest.mark.parametrize("headers", [{}, {"traceparent": UNSAMPLED}, {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}])
def test_what_nobody_asked_for_is_not_traced(traced, collector, span_of, headers):
    quiet = post(traced, **headers)
    # What is sent after it comes after it.
    span_of(post(traced, traceparent=SAMPLED))
    assert collector.of_request(quiet.headers["x-request-id"]) is None


def test_every_route_and_both_protocols_are_traced(traced, span_of):
    get = traced.get("/v1/layers/unheard-of", headers={"traceparent": SAMPLED})
    span = span_of(get)
    assert (span.name, span.attributes["http.response.status_code"]) == ("GET /v1/layers/{name}", 404)
    assert span.attributes["normserve.error"] == "unknown_layer"
    assert not span.is_failed
    nowhere = span_of(traced.get("/nowhere/at/all", headers={"traceparent": SAMPLED}))
    assert nowhere.name == "GET"
    assert "http.route" not in nowhere.attributes
    tensor = {"name": "x", "shape": [2, 4], "datatype": "FP32", "data": list(range(8))}
    infer = traced.post("/v2/models/layer_norm/infer", json={"inputs": [tensor]}, headers={"traceparent": SAMPLED})
    assert infer.status_code == 200, infer.text
    span = span_of(infer)
    assert span.name == "POST /v2/models/{name}/infer"
    assert (span.attributes["normserve.transport"], span.attributes["normserve.rows"]) == ("oip", 2)


def test_a_refusal_has_the_stage_that_it_ended_in(traced, collector, span_of):
    answer = post(traced, params={"timeout_ms": 1e-6}, traceparent=SAMPLED)
    span = span_of(answer)
    assert span.is_failed
    assert span.attributes["error.type"] == span.attributes["normserve.error"] == "deadline_exceeded"
    assert [stage.name for stage in collector.children(span)] == ["recv", "parse", "queue"]


def test_a_ratio_of_one_traces_everything(launched, until, span_of):
    with collecting() as collector:
        server = launched("--trace-endpoint", f"{collector.url}/some/where", "--trace-ratio", "1", env=SOON)
        with server.client() as http:
            root = span_of(post(http), collector)
            group_norm = post(http, "/v1/group_norm", packed(x=IMAGES), {"num_groups": 8}, content_type="")
            assert group_norm.status_code == 200
            assert span_of(group_norm, collector).attributes["normserve.rows"] == len(IMAGES)
            child = span_of(post(http, traceparent=UNSAMPLED), collector)
        assert (root.parent_id, child.parent_id) == ("", PARENT)
        assert root.trace_id != child.trace_id == TRACE
        assert set(collector.paths) == {"/some/where"}


def test_requests_of_one_launch_link_to_its_span(launched, tmp_path, until, span_of):
    with collecting() as collector:

        def start_stage(env, script):
            return launched(
                "--trace-endpoint", collector.url, "--trace-ratio", "1", env={**SOON, **env}, script=script
            )

        with stage_on(start_stage, tmp_path / "gate", until) as stage:
            running = stage.occupy_device()
            waiting = [stage.post_later(16, rows) for rows in (1, 2, 3)]
            stage.wait_for_queue(3)
            stage.open_gate()
            answers = [each.result() for each in waiting]
            spans = [span_of(answer, collector) for answer in answers]
            alone = span_of(running.result(), collector)
            until(lambda: collector.named("launch layer_norm"))
        assert [answer.headers["x-batch-size"] for answer in answers] == ["3"] * 3
        (launch,) = collector.named("launch layer_norm")
        assert [span.links for span in spans] == [{(launch.trace_id, launch.span_id)}] * 3
        assert launch.links == {(span.trace_id, span.span_id) for span in spans}
        assert launch.parent_id == ""
        assert len({span.trace_id for span in (launch, *spans)}) == 4
        assert launch.attributes["normserve.batch_size"] == 3
        for span in spans:
            kernel = next(stage for stage in collector.children(span) if stage.name == "kernel")
            assert launch.began <= kernel.began <= kernel.ended <= launch.ended + 2
        assert alone.links == set()


def test_the_end_of_a_server_exports_what_is_left(start_server, until):
    with collecting() as collector:
        # Nothing is sent by itself within the test.
        server = start_server(
            "--trace-endpoint", collector.url, "--trace-ratio", "1", env={"OTEL_BSP_SCHEDULE_DELAY": "600000"}
        )
        with server.client() as http:
            answer = post(http)
        assert not collector.spans
        server.stop()
        assert collector.of_request(answer.headers["x-request-id"]) is not None
        assert collector.paths == ["/v1/traces"]


def test_a_scrape_of_openmetrics_names_the_trace(traced, span_of):
    answer = post(traced, traceparent=SAMPLED)
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    scrape = traced.get("/metrics", headers={"accept": accept})
    assert scrape.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    exemplars = [
        (sample.labels, sample.exemplar)
        for family in text_string_to_metric_families(scrape.text)
        for sample in family.samples
        if sample.name == "normserve_request_duration_seconds_bucket" and sample.exemplar is not None
    ]
    assert {exemplar.labels["trace_id"] for _, exemplar in exemplars} == {span_of(answer).trace_id}
    assert "trace_id" not in traced.get("/metrics").text


def test_clients_that_share_memory_are_traced(launched, tmp_path, until):
    with collecting() as collector:
        path = tmp_path / "local"
        launched("--trace-endpoint", collector.url, "--trace-ratio", "0", "--local", str(path), env=SOON)
        with LocalConnection(path) as client:
            quiet = client.layer_norm(np.ones((2, 16), np.float32))
            told = client.layer_norm(np.ones((2, 16), np.float32), traceparent=SAMPLED)
            refused = client.layer_norm(np.ones((2, 16), np.float32), traceparent=SAMPLED, query="eps=0")
        until(lambda: collector.of_request(refused.request_id))
        span = collector.of_request(told.request_id)
        assert (span.name, span.kind, span.trace_id, span.parent_id) == ("local layer_norm", SERVER, TRACE, PARENT)
        said = {"normserve.transport": "local", "normserve.rows": 2, "normserve.status": 200}
        assert said.items() <= span.attributes.items()
        stages = collector.children(span)
        names = [stage.name for stage in stages]
        assert names == [name for name in STAGES[:-1] if name in names]
        assert "kernel" in names
        for earlier, later in itertools.pairwise(stages):
            assert earlier.ended <= later.began + 2
        assert collector.of_request(refused.request_id).attributes["normserve.error"] == "invalid_parameter"
        assert collector.of_request(quiet.request_id) is None


def test_every_process_of_a_fleet_sends_its_own(launched, until):
    with collecting() as collector:
        options = ("--devices", "cpu,cpu", "--frontends", "1", "--trace-endpoint", collector.url)
        server = launched(*options, env=SOON | {"OTEL_RESOURCE_ATTRIBUTES": "service.name=norms,deployment=test"})
        with server.client() as http:
            for _ in range(4):
                assert post(http, traceparent=SAMPLED).status_code == 200
        until(lambda: len(collector.named("POST /v1/layer_norm")) == 4)
        spans = collector.named("POST /v1/layer_norm")
        assert {span.resource["normserve.process"] for span in spans} == {"0", "1"}
        assert {(span.trace_id, span.parent_id) for span in spans} == {(TRACE, PARENT)}
        assert {(span.resource["service.name"], span.resource["deployment"]) for span in spans} == {
            ("norms", "test")
        }
        assert len({span.resource["service.instance.id"] for span in spans}) == 2


def test_lines_of_the_log_name_the_trace(launched, collector, until):
    """Of a request that is traced here, and of one that only its client traces."""
    options = ("--access-log", "--log-format", "json", "--trace-endpoint", collector.url, "--trace-ratio", "0")
    server = launched(*options, env=SOON)
    with server.client() as http:
        answers = [post(http, traceparent=SAMPLED), post(http, traceparent=UNSAMPLED), post(http)]

    def logged() -> dict[str, str | None]:
        lines = [json.loads(line) for line in server.lines if '"normserve.access"' in line]
        return {line["request_id"]: line.get("trace_id") for line in lines}

    until(lambda: len(logged()) == 3)
    assert [logged()[answer.headers["x-request-id"]] for answer in answers] == [TRACE, TRACE, None]


def test_every_attribute_is_on_the_page(traced, collector, span_of):
    """And the page has none that is never sent, but those of API keys and of shared memory."""
    spans = [
        span_of(post(traced, traceparent=SAMPLED, user_agent="me/1")),
        span_of(post(traced, params={"timeout_ms": 1e-6}, traceparent=SAMPLED)),
    ]
    sent = {name for span in spans for name in span.attributes}
    page = (Path(__file__).parents[3] / "docs/observability.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| attribute |")
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", table.partition("\n\n")[0]))
    assert named - sent == {"normserve.key", "network.transport", "normserve.status"}
    assert sent <= named
