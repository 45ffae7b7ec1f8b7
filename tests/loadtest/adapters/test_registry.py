import pytest
from normload.adapters.registry import ADAPTERS
from normload.load.request_cases import RequestCase
from normserve.client import DType

ROWS = RequestCase("layer_norm", (3, 8), DType.FLOAT32, seed=1)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_answer_may_be_as_long_as_a_right_one(name):
    most = ADAPTERS[name]().make_request(ROWS, ROWS.make_tensors()).max_response_bytes
    assert 0 <= most - ROWS.make_tensors()["x"].nbytes - 2**16 <= 8
