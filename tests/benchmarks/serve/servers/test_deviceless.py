"""A server with nothing behind it answers x for y."""

import httpx
import pytest

from benchmarks.serve import small
from benchmarks.serve.clients import posts
from benchmarks.serve.servers import launch, scrape


@pytest.fixture(scope="module")
def server():
    with launch.run_deviceless({0, 1}, posts.make_parameters(small.COLS)) as running:
        yield running


def send(server, body: bytes) -> bytes:
    url = f"http://127.0.0.1:{server.address}{server.path}"
    answer = httpx.post(url, content=body, headers={"content-type": "application/x-safetensors"})
    return answer.raise_for_status().content


def test_it_goes_all_the_way_but_to_a_device(server):
    before = scrape.fetch_samples(server.address)
    body = small.make_request_body()
    assert send(server, body)[-2 * small.COLS :] == body[-2 * small.COLS :]
    assert scrape.compute_requests_per_launch(before, scrape.fetch_samples(server.address)) == 1


def test_its_answer_is_not_taken_for_layer_norm(server):
    body = small.make_request_body()
    answer = send(server, body)
    with pytest.raises(AssertionError):
        small.check_response(body, posts.make_parameters(small.COLS), answer)
