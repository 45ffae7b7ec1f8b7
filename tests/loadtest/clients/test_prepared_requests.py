import numpy as np
import pytest
from normload.adapters.native import NativeAdapter
from normload.adapters.registry import ADAPTERS
from normload.clients.prepared_requests import check_supported, prepare_request
from normload.load.element_types import to_float64
from normload.load.request_cases import RequestCase
from normload.load.toml_tables import ScenarioError
from normserve.client import DType
from normserve.client.http.server_address import ServerAddress
from normserve.codec import safetensors

CASE = RequestCase("rms_norm", (3, 8), DType.FLOAT16)
ROWS = RequestCase("layer_norm", (3, 8), DType.FLOAT32, seed=1)

HTTP, SHARED = (
    ServerAddress.parse_url("http://host:81/below"),
    ServerAddress.parse_url("unix:///run/normserve.sock"),
)


def request(api_key=None):
    return prepare_request(CASE, NativeAdapter(), ServerAddress.parse_url("http://host:81/below"), api_key)


def test_a_request_is_ready_to_be_sent():
    made = request()
    body = b"".join(bytes(part) for part in made.parts)
    first, *headers = made.head.decode().split("\r\n")
    assert first.startswith("POST /below/v1/rms_norm ")
    assert headers[0] == "Host: host:81"
    assert headers[-3:] == [f"Content-Length: {len(body)}", "", ""]
    assert made.nbytes == len(body)
    np.testing.assert_array_equal(
        to_float64(safetensors.decode(memoryview(body))["x"]), to_float64(made.tensors["x"])
    )


def test_a_key_is_a_bearer_token():
    assert b"Authorization" not in request().head
    assert b"\r\nAuthorization: Bearer secret\r\n" in request("secret").head


@pytest.mark.parametrize(
    "case",
    [
        RequestCase("rms_norm", (3, 8), DType.FLOAT32),
        RequestCase("layer_norm/backward", (3, 8), DType.FLOAT32),
        RequestCase("layer_norm", (3, 8), DType.BFLOAT16),
        RequestCase("layer_norm", (3, 8), DType.FLOAT32, activation="silu"),
        RequestCase("layer_norm", (3, 8), DType.FLOAT32, residual=True),
        RequestCase("layer_norm", (3, 8), DType.FLOAT32, affine=False),
    ],
)
def test_what_a_kind_of_server_does_not_do_is_said_before_it_is_asked(case):
    for name in ("npy", "kserve"):
        with pytest.raises(ScenarioError, match="such a server does only"):
            check_supported(ADAPTERS[name](), [ROWS, case], HTTP)
    for address in (HTTP, SHARED):
        check_supported(ADAPTERS["normserve"](), [ROWS, case], address)


@pytest.mark.parametrize("name", ["npy", "kserve"])
def test_only_normserve_is_asked_through_shared_memory(name):
    with pytest.raises(ScenarioError, match="only normserve shares memory"):
        check_supported(ADAPTERS[name](), [ROWS], SHARED)


def test_what_shares_memory_is_asked_by_a_call():
    made = prepare_request(CASE, NativeAdapter(), SHARED, "secret")
    assert made.call is not None
    assert (made.call.path, made.head, list(made.parts)) == ("/v1/rms_norm", b"", [])
    assert made.nbytes == sum(tensor.nbytes for tensor in made.tensors.values())
    assert made.max_response_bytes == made.tensors["x"].nbytes + sum(
        output.max_bytes for name, output in made.call.expected_results.items() if name != "y"
    )


def test_npy_is_posted_to_the_root_of_a_url_without_a_path():
    made = prepare_request(ROWS, ADAPTERS["npy"](), ServerAddress.parse_url("http://host:81"), None)
    assert made.head.startswith(b"POST / HTTP/1.1\r\n")
