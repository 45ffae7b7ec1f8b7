"""What repeated calls of GroupNorm are called with."""

import fusednorm.api.group_norm as ours
import torch

from tests.kernels.ops.group_norm.cases import channels_last, in_the_other_format

N, C, GROUPS = 2, 16, 4
SHAPE = (N, C, 8, 8)
PASSES = ("forward", "backward")


class Operands:
    """Tensors of one call of both passes; each has memory of its own."""

    def __init__(self, last=False, shape=SHAPE, groups=GROUPS, dtype=torch.float32, **given):
        self.groups = groups
        given = {"residual": False, "scale": False, "affine": True, "saved": True, "outside": False} | given
        odd = given.get("odd", False)
        lay = channels_last if last else lambda x: x
        x, dy, residual, outside = (lay(torch.randn(shape).to(dtype)) for _ in range(4))
        if odd:
            dy, residual, outside = map(in_the_other_format, (dy, residual, outside))
        weight, bias = torch.randn(shape[1]), torch.randn(shape[1]).half()
        scale, shift = torch.randn(shape[0], 2 * shape[1]).to(dtype).chunk(2, dim=1)
        of_samples = {"scale": scale, "shift": shift} if given["scale"] else {}
        self.x, self.dy = x, dy
        self.affine = (weight, bias) if given["affine"] else (None, None)
        self.options = {"residual": residual if given["residual"] else None, **of_samples}
        saved = torch.randn(shape[0], groups), torch.rand(shape[0], groups) + 0.5
        self.gradients = dict(zip(("mean", "rstd"), saved, strict=True)) if given["saved"] else {}
        self.gradients["dresidual_out"] = outside if given["outside"] else None

    def forward(self, **more):
        return ours.group_norm_forward(self.x, self.groups, *self.affine, **self.options, **more)

    def backward(self, **more):
        more.pop("stats", None)
        more.pop("out_dtype", None)
        return ours.group_norm_backward(
            self.dy, self.x, self.groups, *self.affine, **self.options, **self.gradients, **more
        )

    def call(self, pass_, **more):
        return getattr(self, pass_)(**more)


def call(pass_="forward", **changed):
    """A plain call of a pass, with other arguments where they are given."""
    x = changed.pop("x", None)
    x = torch.randn(SHAPE) if x is None else x
    affine = [changed.pop(name, torch.randn(C)) for name in ("weight", "bias")]
    groups = changed.pop("groups", GROUPS)
    if pass_ == "forward":
        return ours.group_norm_forward(x, groups, *affine, **changed)
    dy = changed.pop("dy", None)
    return ours.group_norm_backward(torch.randn_like(x) if dy is None else dy, x, groups, *affine, **changed)
