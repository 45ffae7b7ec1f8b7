"""What is repeated, how patiently, and what is raised in the end."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import islice

import httpx
import numpy as np
import pytest
from normserve import client as api
from normserve.client.deadlines import Deadline
from normserve.client.errors import ApiError, ConnectionFailedError
from normserve.client.responses.api_errors import make_api_error
from normserve.client.retries import RetryPolicy, RetrySchedule

from .harness.fake_server import FakeServer, problem_answer, tensors_answer

X = np.zeros((2, 2), np.float32)
SUCCESS = tensors_answer(y=X)


@pytest.mark.parametrize(
    "failure",
    [
        problem_answer(429, "overloaded", **{"retry-after": "0"}),
        problem_answer(503, "draining"),
        httpx.Response(503, content=b"<html>no server"),
        httpx.Response(502, content=b"<html>bad gateway"),
        httpx.Response(500, content=b"Internal Server Error"),
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("too slow"),
        httpx.ReadError("reset"),
        httpx.RemoteProtocolError("server disconnected"),
    ],
    ids=lambda failure: type(failure).__name__ + str(getattr(failure, "status_code", "")),
)
def test_what_may_succeed_later_is_repeated_whole(connect, failure):
    server = FakeServer(failure, failure, SUCCESS)
    np.testing.assert_array_equal(connect(server).layer_norm(X).y, X)
    assert len(server.requests) == 3
    assert {request.content for request in server.requests} == {server.request.content}


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "malformed_payload", api.InvalidRequestError),
        (401, "unauthorized", api.UnauthorizedError),
        (404, "not_found", api.NotFoundError),
        (404, "unknown_layer", api.UnknownLayerError),
        (406, "not_acceptable", api.ApiError),
        (413, "too_large", api.TooLargeError),
        (415, "unsupported_media_type", api.InvalidRequestError),
        (422, "invalid_shape", api.InvalidRequestError),
        (500, "device_failure", api.ServerFailureError),
        (504, "deadline_exceeded", api.DeadlineExceededError),
    ],
)
def test_what_will_not_succeed_is_raised_at_once(connect, status, code, error):
    server = FakeServer(problem_answer(status, code))
    with pytest.raises(error, match="it was not to be") as caught:
        connect(server).layer_norm(X)
    assert len(server.requests) == 1
    assert type(caught.value) is error
    assert (caught.value.status, caught.value.code) == (status, code)
    assert caught.value.detail == "it was not to be"
    assert caught.value.request_id == "abc"
    assert caught.value.problem["status"] == status


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (problem_answer(429, "overloaded"), api.OverloadedError),
        (problem_answer(503, "draining"), api.UnavailableError),
        (httpx.ConnectError("refused"), api.ConnectionFailedError),
        (httpx.ConnectError("refused"), ConnectionError),
    ],
)
def test_attempts_are_bounded(connect, failure, error):
    server = FakeServer(failure)
    with pytest.raises(error):
        connect(server, tries=4).layer_norm(X)
    assert len(server.requests) == 4


def test_the_clients_own_timeout_is_not_repeated(connect):
    server = FakeServer(httpx.ReadTimeout("too slow"))
    with pytest.raises(api.RequestTimeoutError) as caught:
        connect(server).layer_norm(X)
    assert isinstance(caught.value, TimeoutError)
    assert len(server.requests) == 1


def test_the_api_key_is_sent(connect):
    server = FakeServer()
    connect(server, api_key="secret").layer_norm(X)
    assert server.request.headers["authorization"] == "Bearer secret"
    connect(server).layer_norm(X)
    assert "authorization" not in server.request.headers


def pauses(policy, failure, jitter=1.0, timeout_s=None):
    attempts = RetrySchedule(policy, Deadline(timeout_s), lambda: jitter)
    return list(iter(lambda: attempts.take_next_pause_s(failure), None))


def overloaded(retry_after=None):
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return make_api_error(429, headers, b"")


def test_pauses_double_up_to_a_limit():
    policy = RetryPolicy(tries=6, first_pause_s=1, longest_pause_s=5)
    assert pauses(policy, overloaded()) == [1, 2, 4, 5, 5]
    assert pauses(policy, overloaded(), jitter=0.0) == [0.5, 1, 2, 2.5, 2.5]


def test_retry_after_is_the_least_that_is_waited():
    policy = RetryPolicy(tries=3, first_pause_s=1, longest_pause_s=30)
    assert pauses(policy, overloaded("7"), jitter=0.0) == [7, 7]
    assert pauses(policy, overloaded("7")) == [7.5, 8]
    assert pauses(policy, overloaded("30")) == [30, 30]


@pytest.mark.parametrize("seconds", ["31", "9" * 30, "9" * 5000])
def test_a_server_that_asks_for_too_much_patience_is_not_asked_again(seconds):
    assert pauses(RetryPolicy(longest_pause_s=30), overloaded(seconds)) == []


def test_a_pause_that_the_call_has_no_time_for_is_not_begun():
    policy = RetryPolicy(tries=5, first_pause_s=100, longest_pause_s=300)
    assert pauses(policy, overloaded(), timeout_s=250) == [100, 200]
    assert pauses(policy, overloaded("240"), timeout_s=230) == []


def test_any_number_of_attempts_has_finite_pauses():
    assert set(pauses(RetryPolicy(tries=2000, first_pause_s=1e-9, longest_pause_s=1.0), overloaded())[100:]) == {
        1.0
    }


def test_retry_after_may_be_a_date():
    now = datetime.now(UTC)
    assert 50 < overloaded(format_datetime(now + timedelta(seconds=60), usegmt=True)).retry_after_s <= 60
    assert overloaded(format_datetime(now - timedelta(seconds=60), usegmt=True)).retry_after_s == 0
    assert 50 < overloaded(format_datetime(now + timedelta(seconds=60))).retry_after_s <= 60
    # "-0000": a time in UTC that says nothing of where it was written.
    naive = (now + timedelta(seconds=60)).replace(tzinfo=None)
    assert 50 < overloaded(format_datetime(naive)).retry_after_s <= 60


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "-1", "1.5", "nan", "inf", "1e9", "99999999999999999999 Jan", "0 0 0", "Mon, 1 Jan", ","),
        "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
        "Mon, 01 Jan 2026 99:00:00 GMT",
        "\x00",
    ],
)
def test_a_retry_after_that_means_nothing_is_none(text):
    assert overloaded(text).retry_after_s is None


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"<html>\xff", b'{"code": 7}'])
def test_an_error_from_whoever_stands_between_is_an_error(body):
    error = make_api_error(502, {"x-request-id": "abc"}, body)
    assert isinstance(error, ApiError)
    assert error.request_id == "abc"
    assert "502" in str(error)


def test_a_server_that_starts_is_waited_for_as_long_as_the_call_may_take(connect):
    server = FakeServer(*[problem_answer(503, "not_ready")] * 9, None)
    connect(server, tries=2).layer_norm(X)
    assert len(server.requests) == 10


def test_a_server_that_starts_is_waited_for_no_longer_than_that_nor_where_nothing_is_repeated(connect):
    starting = FakeServer(problem_answer(503, "not_ready"))
    with pytest.raises(api.UnavailableError):
        connect(starting, tries=1).layer_norm(X)
    assert len(starting.requests) == 1
    failure = make_api_error(503, {"content-type": "application/problem+json"}, b'{"code": "not_ready"}')
    policy = RetryPolicy(tries=2, first_pause_s=100, longest_pause_s=300)
    assert pauses(policy, failure, timeout_s=250) == [100, 200]


def test_a_server_that_starts_is_asked_about_as_often_as_it_says():
    starting = make_api_error(503, {"retry-after": "2"}, b'{"code": "not_ready"}')
    attempts = RetrySchedule(RetryPolicy(tries=4, first_pause_s=1), Deadline(1000), lambda: 1.0)
    assert attempts.take_next_pause_s(overloaded()) == 1
    assert [attempts.take_next_pause_s(starting) for _ in range(50)] == [2.5] * 50
    # Other failures are counted as if the server had been ready all the time.
    assert [attempts.take_next_pause_s(overloaded()) for _ in range(3)] == [2, 4, None]
    ending = RetrySchedule(RetryPolicy(first_pause_s=0), Deadline(1.5), lambda: 1.0)
    assert ending.take_next_pause_s(starting) is None


def test_a_call_outlasts_a_restart_that_takes_no_longer_than_reconnect_s():
    refused, starting = httpx.ConnectError("refused"), problem_answer(503, "not_ready")
    server = FakeServer(*[refused] * 9, starting, SUCCESS)
    retries = RetryPolicy(tries=2, first_pause_s=0, reconnect_s=60)
    with api.Client(transport=httpx.MockTransport(server), retries=retries) as client:
        np.testing.assert_array_equal(client.layer_norm(X).y, X)
    assert len(server.requests) == 11


def test_reconnecting_pauses_for_a_second_at_most_and_leaves_the_tries():
    policy = RetryPolicy(tries=3, first_pause_s=0.25, reconnect_s=1000)
    attempts = RetrySchedule(policy, Deadline(None), lambda: 1.0)
    gone = ConnectionFailedError("refused")
    assert [attempts.take_next_pause_s(gone) for _ in range(5)] == [0.25, 0.5, 1, 1, 1]
    assert [attempts.take_next_pause_s(overloaded()) for _ in range(3)] == [0.25, 0.5, None]
    jittered = RetrySchedule(policy, Deadline(None), lambda: 0.0)
    assert list(islice(iter(lambda: jittered.take_next_pause_s(gone), None), 4)) == [0.125, 0.25, 0.5, 0.5]


@pytest.mark.parametrize(
    ("options", "timeout_s"),
    [
        ({"tries": 9, "reconnect_s": 0.5}, None),
        ({"tries": 9, "reconnect_s": 1000}, 0.5),
        ({"tries": 1, "reconnect_s": 1000}, None),
    ],
    ids=["its own time", "the call's timeout", "nothing is repeated"],
)
def test_reconnecting_ends(options, timeout_s):
    policy = RetryPolicy(first_pause_s=1, **options)
    assert pauses(policy, ConnectionFailedError("refused"), timeout_s=timeout_s) == []


def test_the_time_to_reconnect_begins_with_the_first_failed_connection(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    attempts = RetrySchedule(RetryPolicy(reconnect_s=10), Deadline(None), lambda: 1.0)
    gone = ConnectionFailedError("refused")
    waited = []
    while (pause_s := attempts.take_next_pause_s(gone)) is not None:
        waited.append(pause_s)
        now += pause_s
    assert 9 < sum(waited) < 10
