"""What a request's headers say of the trace that it belongs to."""

import pytest
from normserve.traces.parent_span import ParentSpan, make_log_fields, parse_parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def headers(traceparent: str, **more: str) -> dict[bytes, bytes]:
    return {name.encode(): text.encode() for name, text in {"traceparent": traceparent, **more}.items()}


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)])
def test_the_lowest_flag_says_whether_it_is_sampled(flags, is_sampled):
    assert parse_parent(headers(f"00-{TRACE}-{SPAN}-{flags}")) == ParentSpan(TRACE, SPAN, is_sampled, "")


def test_state_comes_along_unless_it_is_longer_than_any_may_be():
    given = headers(f"00-{TRACE}-{SPAN}-01", tracestate="a=1,b=2")
    assert parse_parent(given).state == "a=1,b=2"
    assert parse_parent({**given, b"tracestate": b"a" * 513}).state == ""


def test_a_later_version_may_say_more():
    assert parse_parent(headers(f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like")).trace_id == TRACE
    assert parse_parent(headers(f"cc-{TRACE}-{SPAN}-01")).span_id == SPAN


@pytest.mark.parametrize(
    "invalid",
    [
        "",
        "hello",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"cc-{TRACE}-{SPAN}-01.more",
    ],
)
def test_what_is_invalid_is_as_if_it_were_not_there(invalid):
    assert parse_parent(headers(invalid)) is None


def test_what_is_recorded_here_names_the_trace_before_what_the_client_says():
    given = headers(f"00-{TRACE}-{SPAN}-00")
    assert make_log_fields("id", None, given) == {"request_id": "id", "trace_id": TRACE}
    assert make_log_fields("id", "own", given) == {"request_id": "id", "trace_id": "own"}
    assert make_log_fields("id", None, {}) == {"request_id": "id"}
