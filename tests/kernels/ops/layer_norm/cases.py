"""Inputs of LayerNorm and RMSNorm passes, and what is asserted of their results against the float64 oracle."""

from dataclasses import dataclass, field

import fusednorm
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import reference

from tests.kernels.harness.accuracy import assert_close_to_oracle
from tests.kernels.harness.activations import activate_by_torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Case:
    """Inputs of one forward and backward pass, and what torch makes of them in the same dtypes."""

    op: str
    x: torch.Tensor
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    options: dict = field(default_factory=dict)

    @property
    def parameters(self):
        return (self.weight,) if self.op == "rms_norm" else (self.weight, self.bias)

    def forward(self, library, **extra):
        run = getattr(library, f"{self.op}_forward")
        return run(self.x, *self.parameters, residual=self.residual, **self.options, **extra)

    def backward(self, library, dy, **extra):
        run = getattr(library, f"{self.op}_backward")
        return run(dy, self.x, *self.parameters, residual=self.residual, **self.options, **extra)

    def torch_leaves(self):
        return [
            None if t is None else t.detach().clone().requires_grad_()
            for t in (self.x, self.weight, self.bias, self.residual)
        ]

    def torch_forward(self, x, weight, bias, residual):
        """The plain composition in the dtype of x + residual, without dropout."""
        h = x if residual is None else x + residual
        cols = x.shape[-1]
        weight, bias = (None if p is None else p.to(h.dtype) for p in (weight, bias))
        if weight is not None:
            weight = weight + self.options.get("weight_offset", 0)
        heads = (weight, bias) if weight is not None and weight.ndim == 2 else None
        if heads:
            weight = bias = None
        if self.op == "rms_norm":
            y = F.rms_norm(h, (cols,), weight, self.options.get("eps", 1e-6))
        else:
            y = F.layer_norm(h, (cols,), weight, bias, self.options.get("eps", 1e-5))
        if heads:
            y = y * heads[0] if heads[1] is None else y * heads[0] + heads[1]
        return self.activated(y).to(x.dtype)

    def activated(self, y):
        return activate_by_torch(y, self.options)


def make_case(op, dtype, rows, cols, device, affine=True, residual=False, **options):
    def random(*shape):
        return torch.randn(shape, device=device).to(dtype)

    return Case(
        op,
        random(rows, cols) * 2 + 1,
        random(cols) if affine else None,
        random(cols) if affine and op == "layer_norm" else None,
        random(rows, cols) if residual else None,
        options,
    )


def check_forward(case):
    actual = case.forward(fusednorm, stats=True)
    exact = case.forward(reference, stats=True, precision=torch.float64)
    assert_close_to_oracle(actual.y, exact.y.double(), case.torch_forward(*case.torch_leaves()), "y")
    torch.testing.assert_close(actual.rstd.double(), exact.rstd, rtol=2e-6, atol=0)
    if case.op == "rms_norm":
        assert actual.mean is None
    else:
        scale = case.x.double().abs().max()
        torch.testing.assert_close(actual.mean.double(), exact.mean, rtol=0, atol=float(scale * 1e-6))
    if case.residual is None:
        assert actual.residual_out is None
    else:
        h = (case.x.float() + case.residual.float()).to(case.residual.dtype)
        torch.testing.assert_close(actual.residual_out, h)


def check_backward(case, saved):
    dy = torch.randn_like(case.x)
    extra = {}
    if saved:
        forward = case.forward(fusednorm, stats=True)
        extra = {"rstd": forward.rstd} | ({} if case.op == "rms_norm" else {"mean": forward.mean})
    actual = case.backward(fusednorm, dy, **extra)
    exact = case.backward(reference, dy, precision=torch.float64)
    leaves = case.torch_leaves()
    case.torch_forward(*leaves).backward(dy)
    # Near zero torch's error may be 0 by luck, where ours is that of a sum of terms as large as any.
    noise = float(exact.dx.abs().max()) * 2**-24
    assert_close_to_oracle(actual.dx, exact.dx.double(), leaves[0].grad, "dx", noise=noise)
    if case.residual is not None:
        assert_close_to_oracle(actual.dresidual, exact.dresidual.double(), leaves[3].grad, "dresidual")
    for name, leaf in zip(("dweight", "dbias"), leaves[1:3], strict=True):
        got = getattr(actual, name)
        if leaf is None:
            assert got is None
        else:
            assert got.dtype == leaf.dtype
            right = getattr(exact, name).double()
            assert_close_to_oracle(got, right, leaf.grad, name, noise=float(right.abs().max()) * 2**-21)
