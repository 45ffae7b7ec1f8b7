"""What is asked of a server that has just started, and how its times are told."""

import subprocess
import sys

import httpx
import pytest
from normserve.codec import safetensors

from benchmarks.serve.processes import start_times


@pytest.mark.parametrize("request_", [start_times.FORESEEN, *start_times.UNFORESEEN], ids=lambda each: each.what)
def test_a_body_is_what_its_request_says(request_):
    tensors = safetensors.decode(memoryview(request_.encode_body()))
    assert {name: tensor.shape for name, tensor in tensors.items()} == dict(request_.shapes)
    assert all(any(bytes(tensor.data)) for tensor in tensors.values())


def test_the_table_has_medians():
    rows = [{"cache": "empty", "what": "ready", "ms": ms} for ms in ("5000.0", "7000.0", "6000.0")]
    rows.append({"cache": "full", "what": "ready", "ms": "3000.0"})
    assert start_times.format_table(rows) == [
        "empty cache, ready: 6000 ms (5000 to 7000)",
        "full cache, ready: 3000 ms (3000 to 3000)",
    ]


def test_a_server_that_has_ended_is_not_waited_for():
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""], text=True)
    ended.wait()

    def refuse(request):
        raise httpx.ConnectError("nobody listens")

    with (
        httpx.Client(base_url="http://127.0.0.1", transport=httpx.MockTransport(refuse)) as http,
        pytest.raises(RuntimeError, match="/livez"),
    ):
        start_times._wait_for_ok(http, "/livez", ended, 0.0)
