from normload.load.request_cases import RequestCase
from normserve.client import DType


def test_parameters_do_not_depend_on_the_number_of_rows():
    few, many = (RequestCase("layer_norm", (rows, 8), DType.FLOAT32, seed=3).make_tensors() for rows in (2, 5))
    assert few["weight"] == many["weight"]
    assert few["bias"] == many["bias"]
