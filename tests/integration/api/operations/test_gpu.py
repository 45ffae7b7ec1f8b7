"""Large and small requests to a server that owns a GPU, over HTTP against the oracle; needs a GPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.integration.api.operations.cases import Case, assert_close, default_eps, post

pytestmark = pytest.mark.gpu

# A cold start compiles every kernel that the configuration foresees.
START_S = 300
CHUNK = 100_000

ROWS, SAMPLES = (2048, 4096), (4, 128, 128, 128)
LARGE = [("layer_norm", ROWS, False), ("rms_norm", ROWS, False)]
LARGE += [("group_norm", SAMPLES, last) for last in (False, True)]


@pytest.fixture(scope="module")
def gpu(launched):
    server = launched("--backend", "triton", wait=False)
    server.wait_until_ready(START_S)
    with server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


def in_chunks(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), CHUNK):
        yield content[start : start + CHUNK]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("op", "shape", "nhwc"), LARGE)
def test_large_forward_with_statistics(gpu, op, shape, nhwc, dtype):
    case = Case(op, dtype, dtype, nhwc, shape=shape)
    got = post(gpu, f"/v1/{op}", case.packed(), **case.query(stats="true", activation="silu"))
    assert_close(got, case.right("forward", case.x, eps=default_eps(op), activation="silu", stats=True))


@pytest.mark.parametrize(("op", "shape", "nhwc"), LARGE)
def test_large_backward(gpu, op, shape, nhwc):
    case = Case(op, torch.bfloat16, torch.float32, nhwc, shape=shape)
    dy = case.like_x()
    got = post(gpu, f"/v1/{op}/backward", case.packed(dy=dy), **case.query(activation="silu"))
    assert_close(got, case.right("backward", dy, case.x, eps=default_eps(op), activation="silu"))


@pytest.mark.parametrize("rows", [1, 300, 4096])
def test_upload_in_chunks(gpu, rows):
    case = Case("layer_norm", torch.float32, torch.float32, shape=(rows, 1024))
    got = post(gpu, "/v1/layer_norm", in_chunks(case.packed()))
    assert_close(got, case.right("forward", case.x, eps=default_eps("layer_norm")))


def test_small_and_large_side_by_side(gpu):
    cases = [
        Case("layer_norm", torch.bfloat16, torch.bfloat16, shape=(rows, 4096))
        for rows in (1, 7, 64, 1024, 4096) * 6
    ]

    def ask(case: Case) -> dict[str, torch.Tensor]:
        return post(gpu, "/v1/layer_norm", case.packed())

    with ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(ask, cases))
    for case, got in zip(cases, answers, strict=True):
        assert_close(got, case.right("forward", case.x, eps=default_eps("layer_norm")))
