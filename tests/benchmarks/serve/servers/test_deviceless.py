"""A server with nothing behind it answers x for y."""

import httpx
import pytest

from benchmarks.serve import small_requests
from benchmarks.serve.clients import checked_requests
from benchmarks.serve.servers import server_metrics, server_processes


@pytest.fixture(scope="module")
def server():
    with server_processes.run_deviceless({0, 1}, checked_requests.make_parameters(small_requests.COLS)) as running:
        yield running


def send(server, body: bytes) -> bytes:
    url = f"http://127.0.0.1:{server.address}{server.path}"
    answer = httpx.post(url, content=body, headers={"content-type": "application/x-safetensors"})
    return answer.raise_for_status().content


def test_it_goes_all_the_way_but_to_a_device(server):
    before = server_metrics.fetch_samples(server.address)
    body = small_requests.make_request_body()
    assert send(server, body)[-2 * small_requests.COLS :] == body[-2 * small_requests.COLS :]
    assert server_metrics.compute_requests_per_launch(before, server_metrics.fetch_samples(server.address)) == 1


def test_its_answer_is_not_taken_for_layer_norm(server):
    body = small_requests.make_request_body()
    answer = send(server, body)
    with pytest.raises(AssertionError):
        small_requests.check_response(body, checked_requests.make_parameters(small_requests.COLS), answer)
