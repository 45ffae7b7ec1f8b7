from dataclasses import replace

import httpx
import pytest
from normload.adapters.native import NativeAdapter
from normload.load.request_cases import RequestCase
from normserve.client import Client, DType
from normserve.client.responses.api_response import ApiResponse
from normserve.codec import safetensors

ROWS = RequestCase("layer_norm", (3, 8), DType.FLOAT32, seed=1)


@pytest.mark.parametrize(
    "case",
    [
        ROWS,
        RequestCase("rms_norm/backward", (2, 4), DType.BFLOAT16, residual=True),
        RequestCase("layer_norm", (2, 4, 3), layout="nchw", adaptive=True),
        RequestCase("group_norm", (1, 2, 2, 4), DType.FLOAT16, "silu", num_groups=2, layout="nhwc", adaptive=True),
    ],
)
def test_native_sends_what_the_client_sends(case):
    sent = []

    def answer(request):
        sent.append(request)
        return httpx.Response(503)

    tensors = case.make_tensors()
    client = Client("http://127.0.0.1:8000", transport=httpx.MockTransport(answer))
    with pytest.raises(Exception, match="503"), client:
        getattr(client, case.operation.replace("/", "_"))(**tensors, **case.make_nondefault_client_options())
    exchange = NativeAdapter().make_request(case, tensors)
    assert (exchange.method, exchange.target) == (sent[0].method, sent[0].url.raw_path.decode())
    assert b"".join(exchange.parts) == sent[0].content
    assert exchange.headers["content-type"] == sent[0].headers["content-type"]


def test_native_reads_every_tensor():
    body = b"".join(safetensors.encode({"y": ROWS.make_tensors()["x"], "residual_out": ROWS.make_tensors()["x"]}))
    answer = ApiResponse(200, {"content-type": "application/x-safetensors"}, memoryview(body))
    assert NativeAdapter().parse_tensors(ROWS, answer).keys() == {"y", "residual_out"}


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(
    "case",
    [
        RequestCase("layer_norm", (3, 2, 8), DType.FLOAT16, residual=True, heads=True),
        RequestCase("rms_norm/backward", (5, 4), DType.BFLOAT16, residual=True),
        RequestCase("layer_norm/backward", (4, 8, 3), layout="nchw", adaptive=True),
        RequestCase("group_norm", (3, 2, 2, 4), DType.FLOAT16, "silu", num_groups=2, layout="nhwc", adaptive=True),
        RequestCase("layer_norm_chain", (3, 8), DType.FLOAT32, norms=2),
    ],
)
def test_parts_are_sent_as_several_tensors_and_their_answers_joined(case, parts):
    case = replace(case, parts=parts)
    tensors = case.make_tensors()
    exchange = NativeAdapter().make_request(case, tensors)
    sent = safetensors.decode(memoryview(b"".join(exchange.parts)))
    affine = {name for name in tensors if name.startswith(("weight", "bias"))}
    own = tensors.keys() - affine
    assert sent.keys() == affine | {f"{name}.{part}" for name in own for part in range(parts)}
    for name in own:
        assert b"".join([bytes(sent[f"{name}.{part}"].data) for part in range(parts)]) == bytes(tensors[name].data)
        assert all(sent[f"{name}.{part}"].shape[0] for part in range(parts))
    body = b"".join(safetensors.encode({name: tensor for name, tensor in sent.items() if name not in affine}))
    answer = ApiResponse(200, {"content-type": "application/x-safetensors"}, memoryview(body))
    joined = NativeAdapter().parse_tensors(case, answer)
    assert {name: (each.shape, bytes(each.data)) for name, each in joined.items()} == {
        name: (tensors[name].shape, bytes(tensors[name].data)) for name in own
    }
