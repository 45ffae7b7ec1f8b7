import httpx
import pytest
from normload.adapters.native import Native
from normload.load.cases import Case
from normserve.client import Client, DType
from normserve.client.answers.answer import Answer
from normserve.codec import safetensors

ROWS = Case("layer_norm", (3, 8), DType.FLOAT32, seed=1)


@pytest.mark.parametrize(
    "case",
    [
        ROWS,
        Case("rms_norm/backward", (2, 4), DType.BFLOAT16, residual=True),
        Case("group_norm", (1, 2, 2, 4), DType.FLOAT16, "silu", num_groups=2, layout="nhwc", adaptive=True),
    ],
)
def test_native_sends_what_the_client_sends(case):
    sent = []

    def answer(request):
        sent.append(request)
        return httpx.Response(503)

    tensors = case.tensors()
    client = Client("http://127.0.0.1:8000", transport=httpx.MockTransport(answer))
    with pytest.raises(Exception, match="503"), client:
        getattr(client, case.operation.replace("/", "_"))(**tensors, **case.parameters())
    exchange = Native().exchange(case, tensors)
    assert (exchange.method, exchange.target) == (sent[0].method, sent[0].url.raw_path.decode())
    assert b"".join(exchange.parts) == sent[0].content
    assert exchange.headers["content-type"] == sent[0].headers["content-type"]


def test_native_reads_every_tensor():
    body = b"".join(safetensors.encode({"y": ROWS.tensors()["x"], "residual_out": ROWS.tensors()["x"]}))
    answer = Answer(200, {"content-type": "application/x-safetensors"}, memoryview(body))
    assert Native().tensors(ROWS, answer).keys() == {"y", "residual_out"}
