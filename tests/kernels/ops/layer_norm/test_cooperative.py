"""Rows that several programs share; `test_exchange_gpu` has many more of them."""

import pytest
import torch
from fusednorm.ops.layer_norm import choices
from fusednorm.ops.layer_norm.backward.cooperative import LayerNormBackwardCooperative
from fusednorm.ops.layer_norm.forward.cooperative import LayerNormForwardCooperative

from tests.kernels.ops.layer_norm.cases import check_backward, check_forward, make_case


@pytest.fixture
def share(monkeypatch):
    """Makes the launchers share each row between programs, 256 columns each."""

    def choose(lag):
        forward = LayerNormForwardCooperative(1, num_warps=1, programs_per_sm=4, lag=lag, ahead=1)
        backward = LayerNormBackwardCooperative(256, num_warps=1, programs_per_sm=4, lag=lag, ahead=1)
        monkeypatch.setattr(choices, "choose_forward", lambda *_, **__: forward)
        monkeypatch.setattr(choices, "choose_backward", lambda *_, **__: backward)

    return choose


# What programs exchange is one mean less for RMSNorm; how they take turns is the same.
@pytest.mark.parametrize(
    ("op", "rows", "cols", "lag", "dtype"),
    [
        ("layer_norm", 1, 512, 1, torch.float32),
        ("layer_norm", 5, 1024, 2, torch.bfloat16),
        ("layer_norm", 3, 700, 3, torch.float32),
        ("rms_norm", 1, 512, 1, torch.bfloat16),
        ("rms_norm", 3, 700, 3, torch.float32),
    ],
)
def test_shared_rows_match_the_oracle(op, rows, cols, lag, dtype, share, device, poisoned):
    share(lag)
    case = make_case(op, dtype, rows, cols, device)
    check_forward(case)
    check_backward(case, saved=True)
    check_backward(case, saved=False)


@pytest.mark.parametrize(
    "activation", [{"activation": "silu"}, {"activation": "leaky_relu", "negative_slope": -0.75}]
)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_shared_rows_take_a_residual_and_an_activation(op, activation, share, device, poisoned):
    share(2)
    case = make_case(op, torch.float32, 3, 700, device, residual=True, weight_offset=1, **activation)
    check_forward(case)
    check_backward(case, saved=True)
