"""Programs that share a row: right, whatever else runs.  They wait for one another, so only a GPU can run them."""

import pytest
import torch
from fusednorm import launch, layer_norm_forward
from fusednorm.launch import BackwardTile, ForwardTile

from tests.kernels.test_layer_norm import check_backward, check_forward, make_case

pytestmark = pytest.mark.gpu

SLAB = 4096


@pytest.fixture
def share(monkeypatch):
    """Makes the launchers share each row between as many programs as asked for."""

    def choose(split):
        forward = ForwardTile(1, 1, SLAB, num_warps=4, stages=3, programs_per_sm=2, split=split)
        backward = BackwardTile(1, SLAB, 8, stages=3, programs_per_sm=1, hold_weight=True, split=split)
        monkeypatch.setattr(launch, "choose_forward", lambda cols, itemsize: forward)
        monkeypatch.setattr(launch, "choose_backward", lambda cols, itemsize: backward)

    return choose


@pytest.mark.parametrize("split", [2, 4, 16, 32])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_shared_rows_match_the_oracle(op, split, share, device, poisoned):
    share(split)
    for rows in (1, 7, 300):
        case = make_case(op, torch.float16, rows, SLAB * split - 1016, device)
        check_forward(case)
        check_backward(case, saved=True)
        check_backward(case, saved=False)


def test_large_mean_does_not_cancel_between_slabs(share, device):
    share(4)
    x = torch.randn(5, 4 * SLAB, device=device) + 1e4
    expected = torch.nn.functional.layer_norm(x.double(), x.shape[-1:])
    torch.testing.assert_close(layer_norm_forward(x).y.double(), expected, rtol=0, atol=2e-3)


def test_two_streams_and_a_long_kernel_at_once(share, device):
    share(16)
    xs = [torch.randn(400, 16 * SLAB, device=device) for _ in range(2)]
    expected = [layer_norm_forward(x).y for x in xs]
    matrix = torch.randn(8192, 8192, device=device)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    ys = []
    for _ in range(20):
        with torch.cuda.stream(streams[2]):
            matrix @ matrix
        for x, stream in zip(xs, streams, strict=False):
            with torch.cuda.stream(stream):
                ys.append(layer_norm_forward(x).y)
    torch.cuda.synchronize()
    for i, y in enumerate(ys):
        assert torch.equal(y, expected[i % 2])


def test_a_captured_launch_can_be_replayed(share, device):
    share(8)
    x = torch.randn(100, 8 * SLAB, device=device)
    layer_norm_forward(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer_norm_forward(x).y
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, layer_norm_forward(x).y)
