"""What a client is made with is checked when it is made, and not by its first call."""

import math
from pathlib import Path

import httpx
import numpy as np
import pytest
from normserve.client import AsyncClient, Client, OverloadedError, RetryPolicy

from .harness.fake_server import FakeServer, problem_answer, tensors_answer

X = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"url": None}, "url must be a str, got NoneType"),
        ({"url": Path("/run/normserve.sock")}, "url must be a str"),
        ({"api_key": b"key"}, "api_key must be a str or None, got bytes"),
        ({"timeout_s": "10"}, "timeout_s must be a number or None, got str"),
        ({"retries": 2.5}, "retries must be a RetryPolicy, an int or None, got float"),
        ({"retries": True}, "retries must be a RetryPolicy, an int or None, got bool"),
        ({"max_connections": 1.5}, "max_connections must be an int, got float"),
        ({"verify": None}, "verify must be a bool, a str or an SSLContext, got NoneType"),
        ({"verify": Path("ca.pem")}, "verify must be a bool, a str or an SSLContext"),
        ({"certificate": Path("own.pem")}, "certificate must be a str, a tuple or None"),
        ({"transport": object()}, "transport must be .*BaseTransport or None, got object"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_arguments_of_other_types_are_refused(kind, arguments, says):
    with pytest.raises(TypeError, match=says):
        kind(**arguments)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"retries": -1}, "retries must be at least 0, got -1"),
        ({"max_connections": 0}, "max_connections must be at least 1, got 0"),
        ({"timeout_s": math.nan}, "timeout_s must be above 0"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_arguments_out_of_range_are_refused(kind, arguments, says):
    with pytest.raises(ValueError, match=says):
        kind(**arguments)


@pytest.mark.parametrize(
    "arguments", [{"verify": "no.pem"}, {"certificate": "no.pem"}, {"certificate": ("no.pem",) * 2}]
)
def test_a_certificate_that_is_missing_is_named(arguments):
    with pytest.raises(FileNotFoundError, match=r"no\.pem"):
        Client("https://127.0.0.1", **arguments)


def test_a_transport_of_the_other_kind_is_refused():
    with pytest.raises(TypeError, match="transport must be"):
        Client(transport=httpx.AsyncHTTPTransport())
    with pytest.raises(TypeError, match="transport must be"):
        AsyncClient(transport=httpx.HTTPTransport())


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"tries": 0}, ValueError, "tries must be at least 1, got 0"),
        ({"tries": 2.0}, TypeError, "tries must be an int, got float"),
        ({"first_pause_s": -1}, ValueError, "first_pause_s must be at least 0"),
        ({"longest_pause_s": math.nan}, ValueError, "longest_pause_s must be at least 0"),
        ({"reconnect_s": math.inf}, ValueError, "reconnect_s must be at least 0"),
        ({"first_pause_s": "1"}, TypeError, "first_pause_s must be a number, got str"),
    ],
)
def test_policies_that_mean_nothing_are_refused(values, error, says):
    with pytest.raises(error, match=says):
        RetryPolicy(**values)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_number_of_retries_is_how_often_a_request_is_repeated(monkeypatch, retries):
    monkeypatch.setattr("normserve.client.client.time.sleep", lambda pause_s: None)
    server = FakeServer(*[problem_answer(429, "overloaded")] * retries, tensors_answer(y=X))
    with Client(transport=httpx.MockTransport(server), retries=retries) as client:
        client.layer_norm(X)
    assert len(server.requests) == retries + 1
    server = FakeServer(*[problem_answer(429, "overloaded")] * (retries + 1), tensors_answer(y=X))
    with Client(transport=httpx.MockTransport(server), retries=retries) as client, pytest.raises(OverloadedError):
        client.layer_norm(X)


def test_numbers_of_numpy_are_numbers():
    with Client(timeout_s=np.float32(3), max_connections=np.int64(3), retries=np.int32(2)) as client:
        assert client._retry_policy.tries == 3
