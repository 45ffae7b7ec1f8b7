"""Rows that several programs share, without waiting: what they exchange and compute.

The interpreter runs one program after another, so that a program cannot wait for the next one.  Here programs use
the exchange buffer without waiting, and all launches are made three times: a program that reads a slot too early in
the first launch finds the value in the next one (the third, if one launch computes statistics for another), as long
as no program uses more rounds than the buffer has.  `test_exchange_gpu` tests the waiting itself.
"""

import fusednorm.ops.layer_norm.backward.cooperative as backward_kernels
import fusednorm.ops.layer_norm.forward.cooperative as forward_kernels
import pytest
import torch
import triton
import triton.language as tl
from fusednorm.api import layer_norm as layer_norm_passes
from fusednorm.ops.layer_norm import choice
from fusednorm.ops.layer_norm.backward.cooperative import BackwardCooperative
from fusednorm.ops.layer_norm.forward.cooperative import ForwardCooperative

from tests.kernels.ops.layer_norm.cases import check_backward, check_forward, make_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU programs wait for one another")

DEPTH = tl.constexpr(8)
"""A multiple of the rounds that each exchange buffer here has: the same tags use the same slots in each launch."""


@triton.jit
def _first_tag(exchange_ptr):
    return tl.load(exchange_ptr).to(tl.uint32) + DEPTH


@triton.jit
def _post(slot_ptr, tag, a, b, c):
    floats = slot_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(floats, a)
    tl.store(floats + 2, b)
    tl.store(floats + 4, c)


@triton.jit
def _collect(slot_ptrs, tag):
    floats = slot_ptrs.to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(floats), tl.load(floats + 2), tl.load(floats + 4)


@triton.jit
def _leave(exchange_ptr, last_tag):
    tl.store(exchange_ptr, 0)


@pytest.fixture
def share(monkeypatch):
    """Makes the launchers share each row between programs, 256 columns each, and launch three times."""
    for module in (forward_kernels, backward_kernels):
        monkeypatch.setattr(module, "first_tag", _first_tag)
        monkeypatch.setattr(module, "post", _post)
        monkeypatch.setattr(module, "collect", _collect)
        monkeypatch.setattr(module, "leave", _leave)
    for name in ("plan_forward", "plan_backward"):
        plan = getattr(layer_norm_passes, name)
        monkeypatch.setattr(
            layer_norm_passes, name, lambda *given, plan=plan, **options: 3 * plan(*given, **options)
        )

    def choose(lag):
        forward = ForwardCooperative(1, num_warps=1, programs_per_sm=4, lag=lag, ahead=1)
        backward = BackwardCooperative(256, num_warps=1, programs_per_sm=4, lag=lag, ahead=1)
        monkeypatch.setattr(choice, "choose_forward", lambda *_: forward)
        monkeypatch.setattr(choice, "choose_backward", lambda *_: backward)

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


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_shared_rows_take_a_residual_and_an_activation(op, share, device, poisoned):
    share(2)
    case = make_case(op, torch.float32, 3, 700, device, residual=True, activation="silu", weight_offset=1)
    check_forward(case)
    check_backward(case, saved=True)
