"""One place increments, and a scrape tells."""

import time
from itertools import pairwise

import pytest
from normserve.device import DeviceInfo
from normserve.jobs import Batch, Execution
from normserve.metrics import Metrics, RequestRecord
from prometheus_client.parser import text_string_to_metric_families

from .fake_jobs import job, tensor


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
    counters = {each.name for each in metrics.catalogue if each.kind == "counter"}
    assert all(name.endswith("_total") for name in counters)
    assert {each.name.removesuffix("_total") for each in metrics.catalogue} == {
        each.name for each in scraped(metrics)
    }


def test_every_name_and_label_is_one_of_the_projects_or_of_the_process(metrics):
    assert all(each.name.startswith(("normserve_", "process_")) for each in metrics.catalogue)
    assert not {"process", "le", "instance", "job"} & {
        name for each in metrics.catalogue for name in each.label_names
    }


def test_errors_are_there_before_the_first(metrics):
    assert value(metrics, "errors_total", cause="device_failure") == 0
    assert value(metrics, "rejected_total", reason="overloaded") == 0


def test_launch_is_counted(metrics):
    batch = Batch((job(2, 4), job(3, 4)))
    outputs = ({"y": tensor(2, 4)}, {"y": tensor(3, 4)})
    metrics.observe_launch(batch, Execution(outputs, (64, 96), 0.25, 0.5, 0.125))
    kernel = {"op": "layer_norm", "pass": "forward", "dtype": "float32"}
    assert value(metrics, "kernel_bytes_total", **kernel) == 160
    assert value(metrics, "kernel_seconds_total", **kernel) == 0.5
    assert value(metrics, "kernel_bandwidth_bytes_per_second_sum", **kernel) == 320
    assert value(metrics, "batch_requests_sum") == 2
    assert value(metrics, "batch_bytes_sum") == 80
    assert value(metrics, "transfer_bytes_total", direction="in") == 80
    assert value(metrics, "transfer_bytes_total", direction="out") == 80
    assert value(metrics, "transfer_seconds_total", direction="out") == 0.125


def test_what_is_not_copied_is_no_transfer(metrics):
    outputs = ({"y": tensor(2, 4)},)
    metrics.observe_launch(Batch((job(2, 4),)), Execution(outputs, (64,), 0.25, 0.5, 0.0))
    assert value(metrics, "transfer_bytes_total", direction="in") == 32
    assert value(metrics, "transfer_bytes_total", direction="out") in (None, 0)


def test_request_is_counted(metrics):
    record = RequestRecord("rms_norm", "backward", "float16", status=200, received=1000, sent=1000)
    record.stages = {"kernel": 0.001, "send": 0.002}
    metrics.observe_request(record)
    labels = {"op": "rms_norm", "pass": "backward", "transport": "tcp"}
    assert value(metrics, "requests_total", dtype="float16", code="200", **labels) == 1
    assert value(metrics, "request_duration_seconds_count", **labels) == 1
    assert value(metrics, "request_bandwidth_bytes_per_second_count", **labels) == 1
    assert value(metrics, "stage_duration_seconds_sum", stage="send") == 0.002


def test_error_is_counted_by_cause_and_rejection_by_reason(metrics):
    metrics.observe_request(RequestRecord("layer_norm", status=429, error="overloaded"))
    metrics.observe_request(RequestRecord("layer_norm", status=422, error="invalid_shape"))
    assert value(metrics, "errors_total", cause="overloaded") == 1
    assert value(metrics, "errors_total", cause="invalid_shape") == 1
    assert value(metrics, "rejected_total", reason="overloaded") == 1
    assert value(metrics, "rejected_total", reason="invalid_shape") is None


def test_departure_is_counted_by_stage(metrics):
    metrics.observe_request(RequestRecord("layer_norm", status=499, waiting_in="queue"))
    assert value(metrics, "cancelled_total", stage="queue") == 1


def test_gauges_are_asked_at_each_scrape(metrics):
    inside = [3, 4096]
    metrics.watch_inflight(lambda: inside[0], lambda: inside[1])
    metrics.watch_queue(lambda: inside[0])
    metrics.watch_device("torch", DeviceInfo("a cpu", "cpu", 2e10, {}), lambda: {"allocated": 5})
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


def test_a_process_of_a_fleet_says_which_it_is():
    samples = [sample for family in scraped(Metrics("3")) for sample in family.samples]
    assert {sample.labels["process"] for sample in samples} == {"3"}


def test_buckets_reach_from_ten_microseconds_to_twenty_seconds(metrics):
    metrics.observe_request(RequestRecord("livez", status=200))
    name = "normserve_request_duration_seconds_bucket"
    bounds = [
        float(sample.labels["le"])
        for family in scraped(metrics)
        for sample in family.samples
        if sample.name == name
    ]
    assert bounds[0] == pytest.approx(1e-5)
    assert bounds[-2] > 20
    assert all(later == pytest.approx(2 * earlier) for earlier, later in pairwise(bounds[:-1]))
