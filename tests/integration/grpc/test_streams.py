"""Streams of inferences: answers in order, and an error is an answer."""

import queue
import threading

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.integration.grpc.requests import make_input
from tests.integration.oip.models import random


@pytest.fixture
def stream(address):
    """A client with an open stream, and the queue of its answers."""
    answers = queue.Queue()
    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        yield client, answers
        client.stop_stream()


def test_answers_come_in_order(stream):
    client, answers = stream
    given = [random(1 + place % 3 * 500, 64, seed=place) for place in range(12)]
    for place, x in enumerate(given):
        client.async_stream_infer("layer_norm", [make_input("x", x)], request_id=str(place))
    for place, x in enumerate(given):
        result, error = answers.get(timeout=30)
        assert error is None
        assert result.get_response().id == str(place)
        assert result.as_numpy("y").shape == x.shape


def test_an_error_is_an_answer(stream):
    client, answers = stream
    x = make_input("x", random(4, 8))
    for model in ("layer_norm", "unheard of", "rms_norm"):
        client.async_stream_infer(model, [x])
    (first, _), (_, error), (last, _) = [answers.get(timeout=30) for _ in range(3)]
    assert isinstance(error, InferenceServerException)
    assert "no model has this name" in str(error)
    assert np.isfinite(first.as_numpy("y")).all()
    assert np.isfinite(last.as_numpy("y")).all()


def test_large_tensors(stream):
    client, answers = stream
    x = random(2048, 1024)
    for _ in range(2):
        client.async_stream_infer("layer_norm", [make_input("x", x)], parameters={"stats": True})
    for _ in range(2):
        result, error = answers.get(timeout=30)
        assert error is None
        np.testing.assert_allclose(result.as_numpy("mean"), x.mean(1), atol=1e-5)


def test_a_stream_that_is_cancelled_leaves_nothing(address):
    with triton.InferenceServerClient(address) as client:
        ended = threading.Event()
        for _ in range(3):
            client.start_stream(lambda result, error: ended.set())
            client.async_stream_infer("layer_norm", [make_input("x", random(512, 1024))])
            client.stop_stream(cancel_requests=True)
        assert client.infer("layer_norm", [make_input("x", random(4, 8))]).as_numpy("y") is not None
