"""One place increments, and a scrape tells."""

import os
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from normserve.jobs.device_description import DeviceDescription
from normserve.jobs.job import Batch, BatchResult
from normserve.metrics.exposition import convert_to_open_metrics
from normserve.metrics.metrics import Metrics
from normserve.metrics.registry import COUNTED_AT_ONCE
from normserve.metrics.request_metrics import RequestRecord
from normserve.settings import Settings
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from tests.service.jobs.fake_jobs import job, tensor


@pytest.fixture
def metrics():
    return Metrics()


def scraped(metrics):
    return list(text_string_to_metric_families(metrics.render().decode()))


def value(metrics, name: str, **labels: str):
    samples = [sample for family in scraped(metrics) for sample in family.samples]
    found = [each.value for each in samples if (each.name, each.labels) == (f"normserve_{name}", labels)]
    return found[0] if found else None


def test_two_of_them_are_apart(metrics):
    metrics.set_ready(True)
    assert value(metrics, "ready") == 1
    assert value(Metrics(), "ready") == 0


def test_catalogue_is_what_is_scraped(metrics):
    counters = {each.name for each in metrics.families if each.kind == "counter"}
    assert all(name.endswith("_total") for name in counters)
    assert {each.name.removesuffix("_total") for each in metrics.families} == {
        each.name for each in scraped(metrics)
    }


def test_every_name_and_label_is_one_of_the_projects_or_of_the_process(metrics):
    assert all(each.name.startswith(("normserve_", "process_")) for each in metrics.families)
    assert not {"process", "le", "instance", "job"} & {
        name for each in metrics.families for name in each.label_names
    }


def test_errors_are_there_before_the_first(metrics):
    assert value(metrics, "errors_total", cause="device_failure") == 0
    assert value(metrics, "rejected_total", reason="overloaded", code_class="4xx") == 0
    assert value(metrics, "rejected_total", reason="not_ready", code_class="5xx") == 0
    assert value(metrics, "revoked_total", reason="stalled") == value(metrics, "revoked_total", reason="share") == 0


@pytest.mark.parametrize(("reason", "other"), [("stalled", "share"), ("share", "stalled")])
def test_revocation_is_counted_by_its_reason(metrics, reason, other):
    metrics.observe_revocation(reason)
    assert value(metrics, "revoked_total", reason=reason) == 1
    assert value(metrics, "revoked_total", reason=other) == 0


def test_launch_is_counted(metrics):
    batch = Batch((job(2, 4), job(3, 4)))
    outputs = ({"y": tensor(2, 4)}, {"y": tensor(3, 4)})
    metrics.observe_launch(batch, BatchResult(outputs, (64, 96), 0.25, 0.5, 0.125))
    kernel = {"op": "layer_norm", "pass": "forward", "dtype": "float32"}
    assert value(metrics, "kernel_bytes_total", **kernel) == 160
    assert value(metrics, "kernel_seconds_total", **kernel) == 0.5
    assert value(metrics, "kernel_bandwidth_bytes_per_second_sum", **kernel) == 320
    assert value(metrics, "batch_requests_sum") == 2
    assert value(metrics, "batch_bytes_sum") == 80
    assert value(metrics, "transfer_bytes_total", direction="in") == 80
    assert value(metrics, "transfer_bytes_total", direction="out") == 80
    assert value(metrics, "transfer_seconds_total", direction="in") == 0.25
    assert value(metrics, "transfer_seconds_total", direction="out") == 0.125


def test_what_is_not_copied_is_no_transfer(metrics):
    outputs = ({"y": tensor(2, 4)},)
    metrics.observe_launch(Batch((job(2, 4),)), BatchResult(outputs, (64,), 0.25, 0.5, 0.0))
    assert value(metrics, "transfer_bytes_total", direction="in") == 32
    assert value(metrics, "transfer_bytes_total", direction="out") in (None, 0)


def test_request_is_counted(metrics):
    record = RequestRecord("rms_norm", "backward", "float16", status=200, received_bytes=1000, sent_bytes=1000)
    record.stage_seconds = {"kernel": 0.001, "send": 0.002}
    metrics.observe_request(record)
    labels = {"op": "rms_norm", "pass": "backward", "transport": "tcp"}
    assert value(metrics, "requests_total", dtype="float16", code="200", **labels) == 1
    assert value(metrics, "request_duration_seconds_count", code_class="2xx", **labels) == 1
    assert value(metrics, "request_bandwidth_bytes_per_second_count", **labels) == 1
    assert value(metrics, "stage_duration_seconds_sum", stage="send") == 0.002


def test_error_is_counted_by_cause_and_rejection_by_reason(metrics):
    metrics.observe_request(RequestRecord("layer_norm", status=429, error_code="overloaded"))
    metrics.observe_request(RequestRecord("layer_norm", status=422, error_code="invalid_shape"))
    assert value(metrics, "errors_total", cause="overloaded") == 1
    assert value(metrics, "errors_total", cause="invalid_shape") == 1
    assert value(metrics, "rejected_total", reason="overloaded", code_class="4xx") == 1
    assert value(metrics, "rejected_total", reason="invalid_shape", code_class="4xx") is None


def test_durations_of_results_rejections_and_failures_are_apart(metrics):
    labels = {"op": "layer_norm", "pass": "none", "transport": "tcp"}
    for status in (200, 200, 429, 499, 503):
        metrics.observe_request(RequestRecord("layer_norm", status=status))
    counts = {
        name: value(metrics, "request_duration_seconds_count", code_class=name, **labels)
        for name in ("2xx", "4xx", "5xx")
    }
    assert counts == {"2xx": 2, "4xx": 2, "5xx": 1}


@pytest.mark.parametrize("probe", ["livez", "readyz", "metrics"])
def test_a_probe_that_fails_is_no_rejection(metrics, probe):
    metrics.observe_request(RequestRecord(probe, status=503, error_code="not_ready"))
    assert value(metrics, "rejected_total", reason="not_ready", code_class="5xx") == 0
    assert value(metrics, "errors_total", cause="not_ready") == 1


def test_bytes_of_bodies_need_no_key(metrics):
    labels = {"op": "layer_norm", "pass": "forward", "transport": "unix"}
    for _ in range(3):
        metrics.observe_request(
            RequestRecord("layer_norm", "forward", transport="unix", received_bytes=100, sent_bytes=10)
        )
    assert value(metrics, "body_bytes_total", direction="in", **labels) == 300
    assert value(metrics, "body_bytes_total", direction="out", **labels) == 30


def test_restarts_are_counted_by_process(metrics):
    for child in ("front end 0", "front end 1"):
        metrics.observe_restarts(child, 0)
    metrics.observe_restarts("front end 1")
    assert value(metrics, "child_restarts_total", child="front end 0") == 0
    assert value(metrics, "child_restarts_total", child="front end 1") == 1


def test_requests_are_counted_by_the_name_of_their_key(metrics):
    metrics.add_key_series(["a", "b"])
    assert value(metrics, "key_requests_total", key="a", code="200") == 0
    for status, key in ((200, "a"), (200, "a"), (403, "a"), (200, "b"), (200, None)):
        metrics.observe_request(
            RequestRecord("info", status=status, key_name=key, received_bytes=10, sent_bytes=100)
        )
    assert value(metrics, "key_requests_total", key="a", code="200") == 2
    assert value(metrics, "key_requests_total", key="a", code="403") == 1
    assert value(metrics, "key_requests_total", key="b", code="200") == 1
    assert value(metrics, "key_bytes_total", key="a", direction="in") == 30
    assert value(metrics, "key_bytes_total", key="a", direction="out") == 300


def test_a_key_that_is_gone_keeps_its_series(metrics):
    metrics.add_key_series(["a"])
    metrics.add_key_series(["b"])
    assert value(metrics, "key_bytes_total", key="a", direction="in") == 0


def test_departure_is_counted_by_stage(metrics):
    metrics.observe_request(RequestRecord("layer_norm", status=499, current_stage="queue"))
    assert value(metrics, "cancelled_total", stage="queue") == 1


def test_gauges_are_asked_at_each_scrape(metrics):
    inside = [3, 4096]
    metrics.track_inflight(lambda: inside[0], lambda: inside[1])
    metrics.track_queue(lambda: inside[0])
    metrics.track_device("torch", DeviceDescription("a cpu", "cpu", 2e10, {}), lambda: {"allocated": 5})
    assert value(metrics, "inflight_requests") == value(metrics, "queue_requests") == 3
    inside[0] = 0
    assert value(metrics, "inflight_requests") == 0
    assert value(metrics, "inflight_bytes") == 4096
    assert value(metrics, "device_copy_bandwidth_bytes_per_second", device="a cpu") == 2e10
    assert value(metrics, "device_memory_bytes", kind="allocated") == 5


def test_the_process_is_told_of(metrics):
    samples = {sample.name: sample.value for family in scraped(metrics) for sample in family.samples}
    assert samples["process_resident_memory_bytes"] > 1e6
    assert 0 < samples["process_start_time_seconds"] <= time.time()
    assert samples["process_cpu_seconds_total"] > 0


def test_front_ends_are_told_of_and_their_time_never_goes_back(metrics):
    def of_first(what: str) -> float:
        return value(metrics, f"frontend_{what}", frontend="0")

    with subprocess.Popen(["sleep", "60"]) as idle:
        there = [(0, os.getpid()), (1, idle.pid)]
        metrics.track_front_ends(lambda: there)
        metrics.render()
        seconds = of_first("cpu_seconds_total")
        assert 0 < seconds <= time.process_time()
        assert of_first("resident_memory_bytes") > 1e6
        assert of_first("open_fds") > 2
        # Another one in its place, which has had less.
        there[:] = [(0, idle.pid)]
        metrics.render()
        assert of_first("cpu_seconds_total") >= seconds
        idle.kill()
        idle.wait()
        for gone in ([(0, idle.pid)], []):
            there[:] = gone
            metrics.render()
            assert (of_first("resident_memory_bytes"), of_first("open_fds")) == (0, 0)
            assert of_first("cpu_seconds_total") >= seconds


def test_a_process_of_a_fleet_says_which_it_is():
    samples = [sample for family in scraped(Metrics("3")) for sample in family.samples]
    assert {sample.labels["process"] for sample in samples} == {"3"}


def bounds(metrics, name: str) -> list[float]:
    """The upper bounds of a histogram that has one series."""
    samples = [sample for family in scraped(metrics) for sample in family.samples]
    return [float(each.labels["le"]) for each in samples if each.name == f"normserve_{name}_bucket"]


def in_bucket(metrics, name: str, value: float) -> bool:
    """Whether the one observation of a histogram lies in the bucket that `value` belongs to."""
    samples = [sample for family in scraped(metrics) for sample in family.samples]
    buckets = [each for each in samples if each.name == f"normserve_{name}_bucket"]
    return [each.value for each in buckets] == [float(float(each.labels["le"]) >= value) for each in buckets]


def test_duration_buckets_double_from_ten_microseconds_to_the_longest_transfer(metrics):
    metrics.observe_request(RequestRecord("livez", status=200))
    *found, last = bounds(metrics, "request_duration_seconds")
    assert found == pytest.approx([1e-5 * 2**k for k in range(len(found))])
    assert found[-2] < Settings().transfer_timeout_s < found[-1] < last == float("inf")


def test_kernel_bandwidth_buckets_show_a_loss_of_a_fifth(metrics):
    metrics.observe_launch(Batch((job(2, 4),)), BatchResult(({"y": tensor(2, 4)},), (64,), 0.0, 0.5, 0.0))
    *found, _ = bounds(metrics, "kernel_bandwidth_bytes_per_second")
    assert (found[0], found[-1]) == (1e6, 8e12)
    ratios = [upper / lower for lower, upper in pairwise(found)]
    assert max(ratios) < 2.1
    # As fast as a device's memory.
    assert max(ratio for ratio, lower in zip(ratios, found, strict=False) if lower > 1e9) == pytest.approx(1.25)


def test_stage_buckets_are_those_of_durations(metrics):
    metrics.observe_request(RequestRecord("rms_norm", status=200, stage_seconds={"kernel": 0.001}))
    metrics.observe_request(RequestRecord("livez", status=200))
    assert bounds(metrics, "stage_duration_seconds") == bounds(metrics, "request_duration_seconds")[:27]


def test_bandwidth_buckets_divide_a_decade_in_four_from_a_megabyte_to_a_hundred_gigabytes(metrics):
    metrics.observe_request(answered())
    expected = [10 ** (6 + k / 4) for k in range(21)]
    assert bounds(metrics, "request_bandwidth_bytes_per_second") == pytest.approx([*expected, float("inf")])
    assert expected[-1] == 1e11


def answered(*, seconds_ago: float = 3.0, **changes) -> RequestRecord:
    """A request whose header was complete some time ago."""
    described = {
        "op": "rms_norm",
        "direction": "forward",
        "status": 200,
        "stage_seconds": {"kernel": 0.001},
    } | changes
    return RequestRecord(**described, began_at=time.perf_counter() - seconds_ago)


def test_duration_is_from_the_header_to_the_end(metrics):
    metrics.observe_request(answered(seconds_ago=3.0))
    labels = {"op": "rms_norm", "pass": "forward", "transport": "tcp", "code_class": "2xx"}
    assert value(metrics, "request_duration_seconds_sum", **labels) == pytest.approx(3.0, abs=1.0)
    assert in_bucket(metrics, "request_duration_seconds", 3.0)


def test_duration_ends_with_the_last_byte_and_not_when_this_process_hears_of_it(metrics):
    record = answered(seconds_ago=3.0)
    record.record_sent(0.5, record.began_at + 2.0, is_relayed=False)
    metrics.observe_request(record)
    labels = {"op": "rms_norm", "pass": "forward", "transport": "tcp", "code_class": "2xx"}
    assert value(metrics, "request_duration_seconds_sum", **labels) == pytest.approx(2.0)
    assert value(metrics, "stage_duration_seconds_sum", stage="send") == 0.5


def test_stage_takes_the_seconds_that_were_measured(metrics):
    metrics.observe_request(answered(stage_seconds={"kernel": 0.003}))
    assert in_bucket(metrics, "stage_duration_seconds", 0.003)


def test_bandwidth_is_bytes_in_and_out_over_the_whole_time(metrics):
    metrics.observe_request(answered(seconds_ago=3.0, received_bytes=6 * 10**9, sent_bytes=3 * 10**9))
    labels = {"op": "rms_norm", "pass": "forward", "transport": "tcp"}
    rate = value(metrics, "request_bandwidth_bytes_per_second_sum", **labels)
    assert rate == pytest.approx(3e9, rel=0.3)
    assert in_bucket(metrics, "request_bandwidth_bytes_per_second", rate)


def test_request_that_brought_and_took_nothing_has_no_bytes(metrics):
    metrics.observe_request(answered())
    labels = {"op": "rms_norm", "pass": "forward", "transport": "tcp"}
    assert value(metrics, "request_bandwidth_bytes_per_second_sum", **labels) == 0


@pytest.mark.parametrize(
    "changes",
    [{"status": 300}, {"status": 500}, {"stage_seconds": {"recv": 0.001}}, {"status": 499}],
    ids=["redirect", "error", "no kernel ran", "client left"],
)
def test_only_an_answer_that_a_kernel_computed_has_a_bandwidth(metrics, changes):
    metrics.observe_request(answered(**changes))
    labels = {"op": "rms_norm", "pass": "forward", "transport": "tcp"}
    assert value(metrics, "request_bandwidth_bytes_per_second_count", **labels) is None
    code_class = f"{changes.get('status', 200) // 100}xx"
    assert value(metrics, "request_duration_seconds_count", code_class=code_class, **labels) == 1


def test_requests_that_ended_are_not_kept_until_a_scrape(metrics):
    record = answered()
    metrics.observe_request(record)
    for _ in range(COUNTED_AT_ONCE - 1):
        metrics.observe_request(answered())
    # This name and the argument of the call itself.
    assert sys.getrefcount(record) == 2


def test_departures_are_there_before_the_first(metrics):
    assert {stage: value(metrics, "cancelled_total", stage=stage) for stage in CANCELLED_IN} == dict.fromkeys(
        CANCELLED_IN, 0
    )


CANCELLED_IN = ("recv", "parse", "queue", "send")


def test_a_request_that_is_traced_stands_for_its_buckets(metrics):
    for trace_id, seconds in (("ab" * 16, 0.001), (None, 0.001), ("cd" * 16, 1.0)):
        began = time.perf_counter() - seconds
        stages = {"recv": seconds}
        record = RequestRecord(
            "layer_norm", "forward", stage_seconds=stages, status=200, began_at=began, trace_id=trace_id
        )
        metrics.observe_request(record)
    text = convert_to_open_metrics(metrics.render()).decode()
    samples = [sample for family in open_families(text) for sample in family.samples if sample.exemplar is not None]
    told = {(each.name, each.exemplar.labels["trace_id"]): each.exemplar for each in samples}
    for name in ("request_duration_seconds", "stage_duration_seconds"):
        for trace_id, seconds in (("ab" * 16, 0.001), ("cd" * 16, 1.0)):
            exemplar = told.pop((f"normserve_{name}_bucket", trace_id))
            assert exemplar.value == pytest.approx(seconds, abs=0.5)
            assert float(exemplar.timestamp) == pytest.approx(time.time(), abs=60)
    assert not told
