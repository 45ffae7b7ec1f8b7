"""LayerNorm and RMSNorm at the sizes of real work, which only a GPU computes in time."""

import fusednorm
import pytest
import torch
from fusednorm.arguments.checks import ACTIVATIONS

from tests.kernels.ops.layer_norm.cases import DTYPES, Case, check_backward, check_forward, make_case

pytestmark = pytest.mark.gpu

COLS = (
    1,
    3,
    17,
    127,
    256,
    512,
    768,
    1000,
    1024,
    1001,
    2048,
    2560,
    3072,
    4096,
    5120,
    6144,
    8192,
    12288,
    14336,
)
LONG_COLS = (16384, 32768, 50257, 65536, 131072, 262144)


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_many_rows_match_the_oracle(op, dtype, cols, device, poisoned):
    case = make_case(op, dtype, 333, cols, device)
    check_forward(case)
    check_backward(case, saved=True)


@pytest.mark.parametrize("cols", LONG_COLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_match_the_oracle(dtype, cols, device, poisoned):
    case = make_case("layer_norm", dtype, 40, cols, device)
    check_forward(case)
    check_backward(case, saved=False)


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
@pytest.mark.parametrize("cols", [768, 8192, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_activations_match_the_oracle(dtype, cols, activation, device):
    case = make_case("layer_norm", dtype, 100, cols, device, residual=True, activation=activation)
    check_forward(case)
    check_backward(case, saved=True)


@pytest.mark.parametrize("cols", [128, 768, 4096, 14336, 16384])
@pytest.mark.parametrize(
    ("dtype", "stream"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32,) * 2]
)
def test_residual_streams_of_their_own_dtype_match_the_oracle(dtype, stream, cols, device, poisoned):
    case = make_case("rms_norm", dtype, 200, cols, device, weight_offset=1.0)
    case.residual = torch.randn(case.x.shape, device=device, dtype=stream)
    check_forward(case)
    check_backward(case, saved=True)


@pytest.mark.parametrize("cols", [64, 80, 96, 128, 256, 2048])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_heads_of_a_slice_of_qkv_match_the_oracle(op, own, dtype, cols, device, poisoned):
    qkv = torch.randn(2, 300, 20 * cols, device=device, dtype=dtype)
    x = qkv[..., 4 * cols : 16 * cols].view(2, 300, 12, cols)
    shape = (12, cols) if own else (cols,)
    weight, bias = torch.randn(2, *shape, device=device, dtype=dtype)
    case = Case(op, x, weight, bias if op == "layer_norm" else None)
    check_forward(case)
    check_backward(case, saved=True)
    check_backward(case, saved=False)


def test_more_than_two_to_the_31_elements_of_heads(device):
    tokens = 2**31 // 4096 + 77
    x = torch.randn(tokens, 3 * 4096, dtype=torch.bfloat16, device=device)[:, :4096].view(tokens, 32, 128)
    weight = torch.randn(32, 128, device=device)
    y = fusednorm.rms_norm_forward(x, weight).y
    assert torch.equal(y[-50:], fusednorm.rms_norm_forward(x[-50:], weight).y)
    dx = fusednorm.rms_norm_backward(y, x, weight).dx
    assert torch.equal(dx[-50:], fusednorm.rms_norm_backward(y[-50:], x[-50:], weight).dx)


def test_a_row_of_two_to_the_25(device):
    case = make_case("layer_norm", torch.bfloat16, 1, 2**25, device)
    check_forward(case)
    check_backward(case, saved=False)


@pytest.mark.parametrize("cols", [1000, 8192, 65536])
def test_more_than_two_to_the_31_elements(cols, device):
    rows = 2**31 // cols + 77
    x = torch.randn(rows, cols, dtype=torch.bfloat16, device=device)
    weight = torch.randn(cols, device=device)
    y = fusednorm.layer_norm_forward(x, weight, weight).y
    assert torch.equal(y[-50:], fusednorm.layer_norm_forward(x[-50:], weight, weight).y)
    dx = fusednorm.layer_norm_backward(y, x, weight, weight).dx
    assert torch.equal(dx[-50:], fusednorm.layer_norm_backward(y[-50:], x[-50:], weight, weight).dx)


@pytest.mark.parametrize("cols", [256, 1024, 8192, 32768])
def test_backward_gives_the_same_bits_every_time(cols, device):
    case = make_case("layer_norm", torch.bfloat16, 2000, cols, device)
    dy = torch.randn_like(case.x)
    first = case.backward(fusednorm, dy)
    for _ in range(5):
        for a, b in zip(first, case.backward(fusednorm, dy), strict=True):
            assert a is b is None or torch.equal(a, b)
