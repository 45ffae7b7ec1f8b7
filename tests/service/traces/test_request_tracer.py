"""From durations to times."""

from itertools import pairwise

import pytest
from normserve.jobs.job import NormResult
from normserve.metrics.request_metrics import RequestRecord
from normserve.traces.request_tracer import SHORTEST_S, StageInterval, compute_stage_intervals


def record(**of_record: object) -> RequestRecord:
    return RequestRecord(began_at=100.0, op="layer_norm", direction="forward", **of_record)


def test_a_result_has_every_stage():
    done = record(status=200, stage_seconds={"recv": 1.0, "parse": 0.5})
    # It was queued at 102, half a second after it was parsed.
    done.record_result(NormResult({}, 3.0, 0.25, 2.0, 0.5, 64, 128, 2, started_at=105.0), response_began_at=108.0)
    done.stage_seconds |= {"serialize": 0.5, "send": 1.5}
    assert compute_stage_intervals(done, 110.5) == [
        StageInterval("recv", 100.0, 101.0),
        StageInterval("parse", 101.0, 101.5),
        StageInterval("queue", 102.0, 105.0),
        StageInterval("copy_in", 105.0, 105.25),
        StageInterval("kernel", 105.25, 107.25),
        StageInterval("copy_out", 107.25, 107.75),
        StageInterval("resume", 107.75, 108.0),
        StageInterval("serialize", 108.0, 108.5),
        StageInterval("send", 108.5, 110.0),
    ]
    assert (done.launch_bytes, done.kernel_bytes, done.batch_size) == (128, 64, 2)


def test_a_relayed_result_has_stages_without_a_gap():
    done = record(status=200)
    done.stage_seconds |= {"recv": 1.0, "relay_in": 0.5, "parse": 0.5}
    done.record_result(NormResult({}, 3.0, 0.25, 2.0, 0.5, 64, 64, 1, started_at=105.0), response_began_at=108.0)
    done.stage_seconds["serialize"] = 0.5
    done.record_sent(1.5, 111.0, is_relayed=True)
    stages = compute_stage_intervals(done, done.ended_at)
    assert all(before.ended_at == after.began_at for before, after in pairwise(stages))
    assert (stages[0].began_at, stages[-1].ended_at) == (done.began_at, done.ended_at)
    assert [stage.name for stage in stages if stage.name.startswith("relay")] == ["relay_in", "relay_out"]


def test_short_stages_are_left_out_except_for_the_kernel():
    short, long = SHORTEST_S / 2, SHORTEST_S * 2
    done = record(status=200, stage_seconds={"recv": 0.0, "parse": long})
    done.record_result(
        NormResult({}, short, short, short, long, 64, 64, 1, started_at=105.0),
        response_began_at=105.0 + 2 * short + long,
    )
    done.stage_seconds |= {"serialize": short, "send": long}
    stages = compute_stage_intervals(done, 110.0)
    assert [stage.name for stage in stages] == ["parse", "kernel", "copy_out", "send"]
    # Those that follow one that is left out begin at its end.
    began = [100.0, 105.0 + short, 105.0 + 2 * short, 105.0 + 3 * short + long]
    assert [stage.began_at for stage in stages] == pytest.approx(began, rel=0, abs=1e-9)


def test_a_failed_request_has_its_short_stages():
    failed = record(status=400, stage_seconds={"recv": 0.0}, current_stage="parse")
    assert [stage.name for stage in compute_stage_intervals(failed, 100.0)] == ["recv", "parse"]


@pytest.mark.parametrize(
    ("stages", "waiting_in", "last"),
    [
        ({}, "recv", StageInterval("recv", 100.0, 104.0)),
        ({"recv": 1.0}, "parse", StageInterval("parse", 101.0, 104.0)),
        ({"recv": 1.0, "parse": 2.0}, "queue", StageInterval("queue", 103.0, 104.0)),
    ],
)
def test_what_fails_has_the_stage_that_it_failed_in(stages, waiting_in, last):
    failed = record(status=503, stage_seconds=stages, current_stage=waiting_in)
    assert compute_stage_intervals(failed, 104.0)[-1] == last
    assert len(compute_stage_intervals(failed, 104.0)) == len(stages) + 1


def test_what_is_no_operation_has_no_stages():
    assert compute_stage_intervals(RequestRecord(op="metrics", status=404, began_at=1.0), 2.0) == []
