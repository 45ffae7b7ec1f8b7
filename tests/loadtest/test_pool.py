import numpy as np
from normload.adapters.native import Native
from normload.cases import Case
from normload.connection import Address
from normload.elements import widen
from normload.pool import make_request
from normserve.client import DType
from normserve.codec import safetensors

CASE = Case("rms_norm", (3, 8), DType.FLOAT16)


def request(api_key=None):
    return make_request(CASE, Native(), Address.of("http://host:81/below"), api_key)


def test_a_request_is_ready_to_be_sent():
    made = request()
    body = b"".join(bytes(part) for part in made.parts)
    first, *headers = made.head.decode().split("\r\n")
    assert first.startswith("POST /below/v1/rms_norm?")
    assert headers[0] == "Host: host:81"
    assert headers[-3:] == [f"Content-Length: {len(body)}", "", ""]
    assert made.nbytes == len(body)
    np.testing.assert_array_equal(widen(safetensors.decode(memoryview(body))["x"]), widen(made.tensors["x"]))


def test_a_key_is_a_bearer_token():
    assert b"Authorization" not in request().head
    assert b"\r\nAuthorization: Bearer secret\r\n" in request("secret").head
