"""The comparison of observations: what it shows, and what it leaves out."""

from tests.corpus.observations import describe_event, differences, stable_response
from tests.corpus.replays import count_events

RECORDED = {"call": {"status": 200, "metrics": {"requests": 1}, "log": ["a", "b"], "body": {"first": [0.5, 1.0]}}}


def changed(**changes):
    return {"call": RECORDED["call"] | changes}


def test_equal_observations_have_no_differences():
    assert differences(RECORDED, changed()) == []


def test_a_difference_names_its_place_and_both_values():
    assert differences(RECORDED, changed(status=403)) == ["call / status: was 200, is 403"]
    assert differences(RECORDED, changed(metrics={"requests": 2})) == ["call / metrics / requests: was 1, is 2"]


def test_lines_of_a_log_are_told_apart():
    assert differences(RECORDED, changed(log=["b", "c"])) == ["call / log: no longer a", "call / log: new c"]


def test_elements_may_differ_by_rounding_alone():
    assert differences(RECORDED, changed(body={"first": [0.5, 1.000001]})) == []
    assert differences(RECORDED, changed(body={"first": [0.5, 1.001]})) == [
        "call / body / first / 1: was 1.0, is 1.001"
    ]


def test_a_wait_keeps_its_magnitude_and_no_more():
    response = {"status": 429, "headers": {"retry-after": "999"}, "body": {"request_id": "other"}}
    assert stable_response(response, "sent")["headers"] == {"retry-after": "about 1000 s"}
    assert stable_response(response, "sent")["body"] == {"request_id": "ID"}


def test_an_event_is_one_line_without_its_time():
    line = '{"time": 1, "level": "INFO", "logger": "audit", "message": "drain", "request_id": "f00", "key": "a"}'
    assert describe_event(line, {"f00": "call"}) == "audit INFO: drain key=a request=call"


def test_events_are_counted_over_all_steps():
    assert count_events([{"log": ["2 times: a", "b"]}, {"status": 200}, {"log": ["a"]}]) == {"a": 3, "b": 1}
