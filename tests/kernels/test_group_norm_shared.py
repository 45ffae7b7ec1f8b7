"""Groups that programs share, without waiting: what they exchange and what they make of it.

The interpreter runs one program after another, so a program cannot wait for the next.  Here the exchange is a plain
mailbox, every launch is made twice, and what a program collects too early the first time it finds the second time:
as long as no program takes more turns than the mailbox is deep.
That the waiting itself is right only a GPU shows: `test_group_norm_gpu`.
"""

import fusednorm._group_norm_nchw_shared_kernels as nchw
import fusednorm._group_norm_nhwc_shared_kernels as nhwc
import pytest
import torch
import triton
import triton.language as tl
from fusednorm import group_norm_forward_plan
from fusednorm.group_norm_forward_launch import ForwardShared, ForwardSharedBlock

from tests.kernels.group_norm_cases import check_forward, make_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU programs wait for one another")


@triton.jit
def _first_tag(mailbox_ptr):
    return tl.load(mailbox_ptr).to(tl.uint32) + 4


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
def _post_pairs(slot_ptrs, wanted, tag, a, b):
    floats = slot_ptrs.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(floats, a, mask=wanted)
    tl.store(floats + 2, b, mask=wanted)


@triton.jit
def _collect_pairs(slot_ptrs, tag):
    floats = slot_ptrs.to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(floats), tl.load(floats + 2)


@triton.jit
def _leave(mailbox_ptr, last_tag):
    tl.store(mailbox_ptr, 0)


@pytest.fixture
def share(monkeypatch):
    """Makes the launchers take a configuration that shares, as far as the interpreter can run it."""
    for module in (nchw, nhwc):
        monkeypatch.setattr(module, "first_tag", _first_tag)
        monkeypatch.setattr(module, "leave", _leave)
    monkeypatch.setattr(nchw, "post", _post)
    monkeypatch.setattr(nchw, "collect", _collect)
    monkeypatch.setattr(nhwc, "post_pairs", _post_pairs)
    monkeypatch.setattr(nhwc, "collect_pairs", _collect_pairs)
    boxes = {}
    from fusednorm import group_norm_forward_held_plan as plan

    def mailbox(device, slots):
        return boxes.setdefault(slots, torch.zeros(2 + 4 * slots, dtype=torch.int64, device=device))

    monkeypatch.setattr(plan, "mailbox", mailbox)
    made = group_norm_forward_plan.plan_forward

    def choose(config):
        monkeypatch.setattr(
            "fusednorm.group_norm_passes.plan_forward",
            lambda *arguments, **options: 2 * made(*arguments, config, **options),
        )

    return choose


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((1, 4, 16, 64), 2),  # four slabs of a group, pieces in one channel
        ((1, 6, 5, 56), 2),  # the second slab is not full, vectors in one channel
        ((1, 2, 419), 1),  # no vector access
        ((1, 6, 419), 2),  # nor here: groups of three channels in three slabs, each vector with its parameters
    ],
)
def test_slabs_of_contiguous_groups_match_the_oracle(shape, groups, lag, dtype, share, device, poisoned):
    share(ForwardShared(2, num_warps=1, programs_per_sm=2, lag=lag, ahead=1))
    check_forward(make_case(shape, groups, dtype, device, activation="silu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize(
    ("shape", "groups", "block_groups"),
    [
        ((1, 16, 16, 16), 4, 2),  # full pieces and blocks, groups of four
        ((1, 48, 9, 11), 16, 8),  # groups of three; the last piece is not full
        ((1, 80, 70), 2, 1),  # groups of whole vectors that waste lanes
        ((1, 40, 40), 5, 2),  # the last block is not full
    ],
)
def test_pieces_of_blocks_match_the_oracle(shape, groups, block_groups, lag, dtype, share, device, poisoned):
    share(ForwardSharedBlock(block_groups, 2, num_warps=1, programs_per_sm=4, lag=lag, ahead=1))
    check_forward(make_case(shape, groups, dtype, device, last=True))


def test_a_residual_and_dropout_of_shared_groups(share, device):
    for last, config in ((False, ForwardShared(1, 1, 1, 0, 1)), (True, ForwardSharedBlock(2, 1, 1, 1, 0, 1))):
        share(config)
        check_forward(make_case((1, 4, 8, 12), 2, torch.float32, device, last, residual=True))
