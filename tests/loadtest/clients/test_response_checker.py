import pytest
from normload.adapters.native import NativeAdapter
from normload.clients import oracle
from normload.clients.prepared_requests import prepare_request
from normload.clients.response_checker import ResponseChecker
from normload.load.element_types import round_to_tensor
from normload.load.request_cases import RequestCase
from normserve.client import DType
from normserve.client.http.server_address import ServerAddress
from normserve.client.responses.api_response import ApiResponse
from normserve.codec import safetensors

CASE = RequestCase("layer_norm", (3, 8), DType.FLOAT32)


@pytest.fixture
def computed(monkeypatch):
    calls = []
    compute = oracle.find_fault
    monkeypatch.setattr(oracle, "find_fault", lambda *given: calls.append(given) or compute(*given))
    return calls


def judge():
    request = prepare_request(CASE, NativeAdapter(), ServerAddress.parse_url("http://localhost"), None)
    return ResponseChecker(NativeAdapter(), [request])


def answer(factor=1.0, change=0.0):
    values = oracle.compute_expected(CASE, CASE.make_tensors())["y"].values.numpy() * factor + change
    body = b"".join(safetensors.encode({"y": round_to_tensor(values, DType.FLOAT32)}))
    return ApiResponse(200, {"content-type": "application/x-safetensors"}, memoryview(body))


def test_the_same_bits_are_computed_once(computed):
    judging = judge()
    for _ in range(5):
        assert judging.find_fault(0, answer()) is None
    assert len(computed) == 1


def test_other_bits_may_be_right_as_well(computed):
    judging = judge()
    assert judging.find_fault(0, answer()) is None
    assert judging.find_fault(0, answer(1 + 1e-6)) is None
    assert len(computed) == 2


def test_wrong_bits_are_found_before_and_after_right_ones():
    judging = judge()
    for _ in range(2):
        assert "times the tolerance" in judging.find_fault(0, answer(1.01))
        assert judging.find_fault(0, answer()) is None


def test_what_cannot_be_read_is_wrong():
    assert "safetensors" in judge().find_fault(0, ApiResponse(200, {}, memoryview(b"hello")))
