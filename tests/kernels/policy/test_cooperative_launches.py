"""`allow_waiting`: cooperative launches, whose programs wait for one another, or none."""

import fusednorm
import pytest
import torch
from fusednorm.arguments.options import NormOptions
from fusednorm.ops.group_norm import call as group_call
from fusednorm.ops.group_norm.affine_step import AffineParameters
from fusednorm.ops.group_norm.backward_choice import plan_backward as plan_group_backward
from fusednorm.ops.group_norm.forward_choice import plan_forward as plan_group_forward
from fusednorm.ops.group_norm.sample_shape import SampleShape
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.choices import plan_backward as plan_row_backward
from fusednorm.ops.layer_norm.choices import plan_forward as plan_row_forward
from fusednorm.policy import cooperative_launches
from fusednorm.results import Backward, Forward

from tests.kernels.harness.arrays import make


@pytest.fixture
def allow(monkeypatch):
    """`allow_waiting` as on a GPU, put back afterwards."""
    monkeypatch.setattr(cooperative_launches, "INTERPRETED", False)
    monkeypatch.setattr(cooperative_launches, "_allowed", True)
    return fusednorm.allow_waiting


def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def group_launches(last):
    """Both passes over groups that one program does not hold."""
    x = empty(2, 24, 24, 1280).movedim(-1, 1) if last else empty(2, 640, 128, 128)
    sample, w = SampleShape(16, x.shape[1] // 16, x[0, 0].numel(), last), empty(x.shape[1])
    saved = torch.empty(2, 16, device="meta")
    given = {"x": x, "sample": sample, "affine": AffineParameters(w, w), "options": NormOptions("group_norm", 16)}
    yield from plan_group_forward(make(group_call.GroupNormForwardCall, **given, out=Forward(x)))
    out = Backward(x, w, w)
    yield from plan_group_backward(
        make(group_call.GroupNormBackwardCall, dy=x, **given, mean=saved, rstd=saved, out=out)
    )


def row_launches():
    """Both passes over rows that one program does not hold."""
    x, w = empty(16, 1 << 17), empty(1 << 17)
    given = {"x": x, "weight": w, "bias": w, "options": NormOptions("layer_norm")}
    yield from plan_row_forward(make(LayerNormForwardCall, **given, out=Forward(x)))
    saved = torch.empty(16, device="meta")
    yield from plan_row_backward(
        make(LayerNormBackwardCall, dy=x, **given, mean=saved, rstd=saved, out=Backward(x, w, w))
    )


@pytest.mark.parametrize("launches", [lambda: group_launches(False), lambda: group_launches(True), row_launches])
def test_no_launch_is_cooperative_once_programs_may_not_wait(launches, allow):
    def cooperative():
        return sum("launch_cooperative_grid" in launch.options for launch in launches())

    assert cooperative() == 2
    allow(False)
    assert cooperative() == 0
    allow(True)
    assert cooperative() == 2


def test_nothing_waits_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(cooperative_launches, "INTERPRETED", True)
    assert not cooperative_launches.may_wait()


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
def test_both_forms_give_the_same_up_to_rounding(last, monkeypatch):
    monkeypatch.setattr(cooperative_launches, "_allowed", True)
    x = torch.randn((2, 1280, 16, 16) if last else (2, 960, 64, 64), device="cuda")
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    w = torch.randn(x.shape[1], device="cuda")

    def both_passes():
        forward = fusednorm.group_norm_forward(x, 32, w, w, activation="silu", stats=True)
        backward = fusednorm.group_norm_backward(x, x, 32, w, w, mean=forward.mean, rstd=forward.rstd)
        return forward.y, backward.dx, backward.dweight

    waited = both_passes()
    fusednorm.allow_waiting(False)
    for result, wanted in zip(both_passes(), waited, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-3)
