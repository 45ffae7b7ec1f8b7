"""Every call of the corpus over gRPC: results are those of HTTP to the bit, and refusals have the same words."""

import ml_dtypes
import pytest
import torch
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from normserve.grpc.statuses import STATUSES

from tests.corpus.calls import refusals, successes
from tests.corpus.transports import parse_parameters

SUCCESSES = {call.name: call for call in successes()}
# The server of these tests has larger limits than that of the corpus.
REFUSALS = {call.name: call for call in refusals() if call.name not in ("too large", "more memory than there is")}

NAMES = {
    torch.float32: "FP32",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.int32: "INT32",
    torch.float64: "FP64",
}


@pytest.fixture(scope="module")
def http(speaking):
    with triton_http.InferenceServerClient(speaking.url.removeprefix("http://")) as http:
        yield http


def to_numpy(tensor):
    """A tensor as tritonclient takes it."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def infer(call, client, of_protocol):
    """Send a call by a client of `of_protocol`, one of tritonclient's parts."""
    model = call.op + ("_backward" if call.direction == "backward" else "")
    inputs = [
        of_protocol.InferInput(name, [*tensor.shape], NAMES[tensor.dtype]).set_data_from_numpy(to_numpy(tensor))
        for name, tensor in call.tensors.items()
    ]
    return client.infer(model, inputs, parameters=parse_parameters(call.parameters))


@pytest.mark.parametrize("name", SUCCESSES)
def test_results_are_those_of_http_to_the_bit(client, http, name):
    call = SUCCESSES[name]
    over_grpc, over_http = infer(call, client, triton), infer(call, http, triton_http)
    outputs = [each.name for each in over_grpc.get_response().outputs]
    assert outputs == [each["name"] for each in over_http.get_response()["outputs"]]
    assert set(call.results) <= set(outputs)
    for each in outputs:
        got, expected = over_grpc.as_numpy(each), over_http.as_numpy(each)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_have_the_words_of_http(client, http, name):
    call = REFUSALS[name]
    with pytest.raises(triton.InferenceServerException) as over_grpc:
        infer(call, client, triton)
    with pytest.raises(triton.InferenceServerException) as over_http:
        infer(call, http, triton_http)
    assert over_grpc.value.message() == over_http.value.message()
    assert over_grpc.value.status() == str(STATUSES[int(over_http.value.status())])
