"""What a scrape says after real requests."""

import gzip
import re

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.harness.raw import answered, exchange
from tests.integration.harness.wire import NPY, SAFETENSORS, npy, packed, post


def scrape(http) -> dict[tuple[str, frozenset], float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples, name: str, **labels: str) -> float:
    """The sum of the samples of that name which carry these labels."""
    wanted = set(labels.items())
    return sum(number for (sample, found), number in samples.items() if sample == name and wanted <= found)


@pytest.fixture(scope="module")
def fresh(launched):
    """A server that nobody else counts on."""
    with launched().client() as http:
        yield http


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [
        ("gzip", True),
        ("GZIP;q=0.5, deflate", True),
        ("gzip;q=0", False),
        ("gzip;q=0.1, identity", False),
        ("br", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text"])
def test_a_scrape_is_compressed_if_the_scraper_accepts_that(server, accepted, is_compressed, accept):
    lines = (
        "GET /metrics HTTP/1.1",
        "Host: localhost",
        f"Accept-Encoding: {accepted}",
        f"Accept: {accept}",
        "",
        "",
    )
    answer = answered(server.address, "\r\n".join(lines).encode())
    assert answer.status_code == 200
    assert answer.headers.get("content-encoding") == ("gzip" if is_compressed else None)
    assert "accept-encoding" in answer.headers["vary"]
    text = gzip.decompress(answer.content) if is_compressed else answer.content
    assert b"normserve_build_info" in text
    assert text.endswith(b"# EOF\n") is (accept != "*/*")


def test_counters_equal_what_was_sent(fresh):
    before = scrape(fresh)
    sent = {"200": 7, "422": 3, "400": 2, "415": 1}
    for _ in range(sent["200"]):
        assert post(fresh).status_code == 200
    for _ in range(sent["422"]):
        post(fresh, params={"eps": "0"})
    for _ in range(sent["400"]):
        post(fresh, content=b"garbage")
    post(fresh, content_type="application/zip")
    after = scrape(fresh)

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    for code, count in sent.items():
        assert grown("normserve_requests_total", op="layer_norm", code=code) == count
    labels = {"op": "layer_norm", "pass": "forward"}
    assert grown("normserve_requests_total", dtype="float32", transport="tcp", code="200", **labels) == 7
    assert grown("normserve_request_duration_seconds_count", **labels) == sum(sent.values())
    assert grown("normserve_errors_total", cause="invalid_parameter") == 3
    assert grown("normserve_errors_total", cause="malformed_payload") == 2
    # What was malformed had been received.
    assert grown("normserve_stage_duration_seconds_count", stage="recv") == 7 + 2
    for stage in ("parse", "queue", "copy_in", "kernel", "copy_out", "resume", "serialize", "send"):
        assert grown("normserve_stage_duration_seconds_count", stage=stage) == 7
    assert grown("normserve_batch_requests_sum") == 7
    assert grown("normserve_request_bandwidth_bytes_per_second_count", **labels) == 7


def test_kernel_counters_agree_with_the_headers(fresh):
    x = np.ones((64, 256), np.float16)
    before = scrape(fresh)
    told_bytes = told_seconds = 0.0
    for _ in range(5):
        headers = post(fresh, "/v1/rms_norm", npy(x)).headers
        told_bytes += int(headers["x-kernel-bytes"])
        told_seconds += float(re.search(r"kernel;dur=([0-9.]+)", headers["server-timing"])[1]) / 1000
    after = scrape(fresh)
    labels = {"op": "rms_norm", "pass": "forward", "dtype": "float16"}
    names = ("normserve_kernel_bytes_total", "normserve_kernel_seconds_total")
    counted = [value(after, name, **labels) - value(before, name, **labels) for name in names]
    assert counted[0] == told_bytes
    assert counted[1] == pytest.approx(told_seconds, rel=1e-3)


def test_nothing_is_in_flight_when_nobody_asks(fresh):
    post(fresh)
    samples = scrape(fresh)
    for name in ("inflight_requests", "inflight_bytes", "queue_requests"):
        assert value(samples, f"normserve_{name}") == 0
    assert value(samples, "normserve_ready") == 1
    assert value(samples, "normserve_device_copy_bandwidth_bytes_per_second") > 1e8


def test_rejections_have_a_reason(fresh):
    before = scrape(fresh)
    fresh.post("/v1/layer_norm", params={"timeout_ms": "0.000001"}, content=npy(np.ones((1, 2), np.float32)))
    after = scrape(fresh)
    name = "normserve_rejected_total"
    grown = value(after, name, reason="deadline_exceeded") - value(before, name, reason="deadline_exceeded")
    assert grown == 1


def test_labels_come_from_closed_sets(fresh):
    for path in ("/a", "/v1/b", "/v1/layers/c", "/docs", "/livez"):
        fresh.get(path, headers={"accept": "text/d", "content-type": "e/f"})
    post(fresh, "/v1/layer_norm/backward", packed(), content_type=SAFETENSORS, accept=NPY)
    allowed = {
        "op": {
            *("layer_norm", "rms_norm", "group_norm", "layers", "livez", "readyz", "metrics", "info"),
            *("sample", "page", "asset", "docs", "__unmatched__"),
        },
        "pass": {"forward", "backward", "none"},
        "dtype": {"float32", "float16", "bfloat16", "none"},
        "transport": {"tcp"},
        "direction": {"in", "out"},
    }
    for _, labels in scrape(fresh):
        for label, found in labels:
            assert label not in allowed or found in allowed[label]


def test_what_is_no_http_is_counted_too(fresh):
    before = scrape(fresh)
    url = fresh.base_url
    assert exchange((url.host, url.port), b"no http\r\n\r\n").status_code == 400
    after = scrape(fresh)
    for name, labels in (
        ("normserve_errors_total", {"cause": "malformed_http"}),
        ("normserve_requests_total", {"op": "__unmatched__", "code": "400"}),
    ):
        assert value(after, name, **labels) - value(before, name, **labels) == 1


def test_nothing_is_unmatched_that_was_found(fresh):
    before = scrape(fresh)
    fresh.get("/docs")
    after = scrape(fresh)
    assert value(after, "normserve_requests_total", op="docs") == 1 + value(
        before, "normserve_requests_total", op="docs"
    )
