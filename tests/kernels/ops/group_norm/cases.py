"""Inputs of GroupNorm tests, what torch makes of them in the same dtypes, and the comparisons."""

from dataclasses import dataclass, field

import fusednorm.api.group_norm as ours
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import reference
from fusednorm.ops.group_norm import backward_choice as group_norm_backward_launch
from fusednorm.ops.group_norm import forward_choice as group_norm_forward_launch
from fusednorm.ops.group_norm.channels_last.backward.columns import BackwardColumnSplit
from fusednorm.ops.group_norm.channels_last.backward.stream import BackwardSampleStream
from fusednorm.ops.group_norm.channels_last.backward.sweep import BackwardBlockSweep
from fusednorm.ops.group_norm.channels_last.forward.columns import ForwardColumnSplit
from fusednorm.ops.group_norm.channels_last.forward.stream import ForwardSampleStream
from fusednorm.ops.group_norm.contiguous.backward.split import GroupNormBackwardSplit
from fusednorm.ops.group_norm.contiguous.backward.sweep import GroupNormBackwardSweep
from fusednorm.ops.group_norm.contiguous.forward.resident import GroupNormForwardResident
from fusednorm.ops.group_norm.contiguous.forward.split import GroupNormForwardSplit
from fusednorm.ops.group_norm.contiguous.forward.sweep import GroupNormForwardSweep
from torch import Tensor

from tests.kernels.harness.accuracy import assert_close_to_oracle
from tests.kernels.harness.activations import activate_by_torch

# One forced configuration of every algorithm, small enough that small inputs take several tiles, splits and
# programs, with full and partial ones among them.
CONTIGUOUS = {
    "tile": (None, None),
    "resident": (GroupNormForwardResident(1, 1), None),
    "sweep": (GroupNormForwardSweep(16, 4), GroupNormBackwardSweep(2, 1, 1)),
    "split": (GroupNormForwardSplit(16, 32, 32, 4), GroupNormBackwardSplit(2, 1, 2, 1)),
}
CHANNELS_LAST = {
    "resident_block": (None, BackwardBlockSweep(1, 1)),
    "stream": (ForwardSampleStream(1, 2, 3, 3), BackwardSampleStream(1, 2, 1, 2, 3)),
    "columns": (ForwardColumnSplit(8, 4, 2, 16, 8, 24, 4), BackwardColumnSplit(8, 1, 2, 1)),
}


def channels_last(x: Tensor) -> Tensor:
    """The same values with the channel axis last in memory."""
    order = (0, *range(2, x.dim()), 1)
    return x.permute(order).contiguous().permute(0, x.dim() - 1, *range(1, x.dim() - 1))


def in_the_other_format(x: Tensor) -> Tensor:
    """The same values, channels-last if they were contiguous, else contiguous."""
    return channels_last(x) if x.is_contiguous() else x.contiguous()


def use_configuration(monkeypatch, name):
    """Make the launchers choose one algorithm whatever the shape; returns whether it is channels-last."""
    forward, backward = (CONTIGUOUS | CHANNELS_LAST)[name]
    if forward is not None:
        monkeypatch.setattr(group_norm_forward_launch, "list_candidates", lambda *_: (forward,))
    if backward is not None:
        monkeypatch.setattr(group_norm_backward_launch, "choose_backward", lambda *_, **__: backward)
    return name in CHANNELS_LAST


@dataclass
class Case:
    """One forward and backward pass."""

    x: Tensor
    groups: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    options: dict = field(default_factory=dict)

    def forward(self, library, **extra):
        return library.group_norm_forward(
            self.x, self.groups, self.weight, self.bias, residual=self.residual, **self.options, **extra
        )

    def backward(self, library, dy, **extra):
        return library.group_norm_backward(
            dy, self.x, self.groups, self.weight, self.bias, residual=self.residual, **self.options, **extra
        )

    def torch_leaves(self):
        return [
            None if t is None else t.detach().clone().requires_grad_()
            for t in (self.x, self.weight, self.bias, self.residual)
        ]

    def torch_forward(self, x, weight, bias, residual):
        """The plain composition in x's dtype, without dropout."""
        h = x if residual is None else x + residual
        y = F.group_norm(h, self.groups, weight, bias)
        return activate_by_torch(y, self.options)


def make_case(shape, groups, dtype, device, last=False, affine=True, residual=False, **options):
    def random(*size):
        return torch.randn(size, device=device).to(dtype)

    lay = channels_last if last else lambda t: t
    return Case(
        lay(random(*shape) * 2 + 1),
        groups,
        random(shape[1]) if affine else None,
        random(shape[1]) if affine else None,
        lay(random(*shape)) if residual else None,
        options,
    )


def check_close(actual, exact, torch_result, scale, what):
    """`assert_close_to_oracle` with the noise of sums whose terms add up to `scale`."""
    assert_close_to_oracle(actual, exact, torch_result, what, noise=float(scale) * 2**-21)


def check_forward(case):
    actual = case.forward(ours, stats=True)
    exact = case.forward(reference, stats=True, precision=torch.float64)
    exact_y = exact.y.double()
    check_close(actual.y, exact_y, case.torch_forward(*case.torch_leaves()), exact_y.abs().max(), "y")
    assert actual.y.stride() == case.x.stride()
    torch.testing.assert_close(actual.rstd.double(), exact.rstd, rtol=5e-6, atol=0)
    scale = float(case.x.double().abs().max())
    torch.testing.assert_close(actual.mean.double(), exact.mean, rtol=0, atol=scale * 1e-6)
    if case.residual is None:
        assert actual.residual_out is None
    else:
        torch.testing.assert_close(actual.residual_out, case.x + case.residual)


def check_backward(case, saved=False):
    dy = torch.randn_like(case.x)
    extra = {}
    if saved:
        forward = case.forward(ours, stats=True)
        extra = {"mean": forward.mean, "rstd": forward.rstd}
    actual = case.backward(ours, dy, **extra)
    exact = case.backward(reference, dy, precision=torch.float64)
    leaves = case.torch_leaves()
    case.torch_forward(*leaves).backward(dy)
    exact_dx = exact.dx.double()
    check_close(actual.dx, exact_dx, leaves[0].grad, exact_dx.abs().max(), "dx")
    assert actual.dx.stride() == case.x.stride()
    for name, leaf in zip(("dweight", "dbias"), leaves[1:3], strict=True):
        got = getattr(actual, name)
        if leaf is None:
            assert got is None
        else:
            assert got.dtype == leaf.dtype
            terms = dy.double().abs().transpose(0, 1).flatten(1).sum(1).max()
            check_close(got, getattr(exact, name).double(), leaf.grad, terms, name)
