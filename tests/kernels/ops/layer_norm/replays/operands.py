"""What repeated calls of LayerNorm's and RMSNorm's passes are called with."""

import fusednorm
import torch
from fusednorm.tensors.arrays import FLOAT8

PASSES = (
    "layer_norm_forward",
    "rms_norm_forward",
    "layer_norm_backward",
    "rms_norm_backward",
    "float8",
    "layer_norm_chain",
)

COLS = 48
WEIGHT, BIAS = torch.randn(2, COLS)


def call(x=None, weight=WEIGHT, bias=BIAS, **options):
    """A plain forward pass of three rows, with other arguments where they are given."""
    return fusednorm.layer_norm_forward(torch.randn(3, COLS) if x is None else x, weight, bias, **options)


def backward(**changed):
    """A backward pass of three rows from saved statistics, with other arguments where they are given."""
    given = {"mean": torch.randn(3), "rstd": torch.rand(3) + 0.5} | changed
    dy, x = given.pop("dy", torch.randn(3, COLS)), torch.randn(3, COLS)
    return fusednorm.layer_norm_backward(dy, x, WEIGHT, BIAS, **given)


WRONG_BACKWARD = {
    "one statistic": {"mean": None},
    "statistics of more rows": {"mean": torch.randn(4), "rstd": torch.rand(4)},
    "statistics of fewer rows": {"mean": torch.randn(2), "rstd": torch.rand(2)},
    "statistics' axes": {"mean": torch.randn(3, 1), "rstd": torch.rand(3, 1)},
    "the mean's shape": {"mean": torch.randn(4)},
    "rstd's shape": {"rstd": torch.rand(1)},
    "statistics' strides": {"mean": torch.randn(6)[::2], "rstd": torch.rand(6)[::2]},
    "statistics' dtype": {"mean": torch.randn(3).half(), "rstd": torch.rand(3).half()},
    "the mean's sign": {"mean": torch._neg_view(torch.randn(3))},
    "dy's rows": {"dy": torch.randn(4, COLS)},
    "dy's columns": {"dy": torch.randn(3, COLS - 1)},
    "the outside gradient's rows": {"dresidual_out": torch.randn(4, COLS)},
}
"""Changes of `backward` that make it wrong."""


class Operands:
    """Tensors of one call of each pass; each has memory of its own."""

    def __init__(self, rows, cols, dtype=torch.float32, **given):
        given = {"residual": False, "affine": True, "saved": True, "outside": False, "heads": 0, "batch": 0} | given
        leading = (
            (rows, given["heads"]) if given["heads"] else (given["batch"], rows) if given["batch"] else (rows,)
        )
        # Of long rows launches alone are compared, and to draw them takes longer than all else.
        draw = torch.randn if cols < 2000 else torch.zeros
        x, dy, residual, outside = (draw(*leading, cols).to(dtype) for _ in range(4))
        shape = (given["heads"], cols) if given["heads"] else (cols,)
        self.x, self.dy = x, dy
        self.weight = torch.randn(shape) if given["affine"] else None
        self.bias = torch.randn(shape).half() if given["affine"] else None
        self.residual = residual.half() if given["residual"] else None
        self.outside = outside if given["outside"] else None
        self.mean, self.rstd = (torch.randn(leading), torch.rand(leading) + 0.5) if given["saved"] else (None, None)
        self.more = [torch.randn(cols), None]

    @property
    def tensors(self):
        named = self.weight, self.bias, self.residual, self.outside, self.mean, self.rstd
        return self.x, self.dy, *named, *self.more

    def call(self, pass_, **more):
        """The pass's results."""
        if pass_ == "layer_norm_chain":
            return (fusednorm.layer_norm_chain(self.x, [self.weight, *self.more], [self.bias, None, None]),)
        if pass_ == "float8":
            pass_, more = "layer_norm_forward", more | {"out_dtype": FLOAT8}
        given = [self.x, self.weight]
        if pass_.startswith("layer_norm"):
            given.append(self.bias)
        if pass_.endswith("forward"):
            more = {"stats": True} | more
        else:
            given.insert(0, self.dy)
            more |= {"rstd": self.rstd, "dresidual_out": self.outside}
            if pass_.startswith("layer_norm"):
                more |= {"mean": self.mean}
        return getattr(fusednorm, pass_)(*given, residual=self.residual, **more)
