"""Programs that share a row: right, whatever else runs.  They wait for one another, so only a GPU can run them."""

import pytest
import torch
from fusednorm import layer_norm_forward
from fusednorm.ops.layer_norm import choices
from fusednorm.ops.layer_norm.backward.cooperative import LayerNormBackwardCooperative
from fusednorm.ops.layer_norm.call import SINGLE_ROW_COLS
from fusednorm.ops.layer_norm.forward.cooperative import LayerNormForwardCooperative

from tests.kernels.harness.on_gpu import on_streams_of_their_own
from tests.kernels.ops.layer_norm.cases import check_backward, check_forward, make_case

pytestmark = pytest.mark.gpu

SLAB = 2048


@pytest.fixture
def share(monkeypatch):
    """Makes the launchers share each row between programs, SLAB columns each."""

    def choose(lag=2, chunks=2):
        forward = LayerNormForwardCooperative(
            chunks, num_warps=SLAB // chunks // 256, programs_per_sm=4, lag=lag, ahead=1
        )
        backward = LayerNormBackwardCooperative(SLAB, num_warps=4, programs_per_sm=2, lag=lag, ahead=1)
        monkeypatch.setattr(choices, "choose_forward", lambda *_, **__: forward)
        monkeypatch.setattr(choices, "choose_backward", lambda *_, **__: backward)

    return choose


@pytest.mark.parametrize("members", [2, 5, 16, 33])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_shared_rows_match_the_oracle(op, members, share, device, poisoned):
    for rows, lag, missing in ((1, 2, 0), (7, 1, 1016), (300, 3, 1)):
        share(lag)
        case = make_case(op, torch.float16, rows, SLAB * members - missing, device)
        check_forward(case)
        check_backward(case, saved=True)
        check_backward(case, saved=False)


def test_large_mean_does_not_cancel_between_slabs(share, device):
    share()
    x = torch.randn(5, 4 * SLAB, device=device) + 1e4
    expected = torch.nn.functional.layer_norm(x.double(), x.shape[-1:])
    torch.testing.assert_close(layer_norm_forward(x).y.double(), expected, rtol=0, atol=2e-3)


def test_two_streams_and_a_long_kernel_at_once(share, device):
    share()
    xs = [torch.randn(400, 16 * SLAB, device=device) for _ in range(2)]
    expected = [layer_norm_forward(x).y for x in xs]
    calls = [lambda x=x: layer_norm_forward(x).y for x in xs]
    for ys in on_streams_of_their_own(calls, device):
        assert all(torch.equal(y, wanted) for y, wanted in zip(ys, expected, strict=True))


def test_a_captured_launch_can_be_replayed(share, device):
    share()
    x = torch.randn(100, 8 * SLAB, device=device)
    layer_norm_forward(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer_norm_forward(x).y
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, layer_norm_forward(x).y)


@pytest.mark.parametrize("cols", [SINGLE_ROW_COLS + 7, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_very_long_row_has_the_same_bits_alone_and_among_others(dtype, cols, device):
    x, weight = torch.randn(4, cols, device=device).to(dtype), torch.randn(cols, device=device).to(dtype)
    together = layer_norm_forward(x, weight, weight, stats=True)
    for row in range(4):
        alone = layer_norm_forward(x[row : row + 1], weight, weight, stats=True)
        assert torch.equal(alone.y[0], together.y[row])
        assert torch.equal(alone.mean[0], together.mean[row])
        assert torch.equal(alone.rstd[0], together.rstd[row])
