"""The headers of a response that say what its computation took."""

import time

from normserve.http.launch_measurements import LaunchMeasurements, record_result
from normserve.jobs.job import NormResult
from normserve.metrics.request_metrics import RequestRecord


def test_headers_have_milliseconds_by_stage_and_whole_numbers():
    measured = LaunchMeasurements(0.001, 0.002, 0.0, 1.5e-6, 0.25, 8192, 1234.56, 3)
    assert dict(measured.make_headers()) == {
        b"server-timing": b"recv;dur=1.000000000, queue;dur=2.000000000, copy_in;dur=0.000000000, "
        b"kernel;dur=0.001500000, copy_out;dur=250.000000000",
        b"x-kernel-bytes": b"8192",
        b"x-kernel-bandwidth": b"1235",
        b"x-batch-size": b"3",
    }


def test_what_a_result_says_is_what_its_response_says():
    record = RequestRecord(stage_seconds={"recv": 0.25})
    measured = record_result(record, NormResult({}, 0.5, 1.0, 2.0, 4.0, 10, 30, 3, 0.0), time.perf_counter())
    assert measured == (0.25, 0.5, 1.0, 2.0, 4.0, 10, 15.0, 3)
    assert {stage: record.stage_seconds[stage] for stage in ("queue", "copy_in", "kernel", "copy_out")} == {
        "queue": 0.5,
        "copy_in": 1.0,
        "kernel": 2.0,
        "copy_out": 4.0,
    }
    assert record.stage_seconds["serialize"] >= 0
    assert record.current_stage == "send"
