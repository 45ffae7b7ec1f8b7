"""Calls of the functions on CPU tensors, and which of torch's kernels they reach."""

import fusednorm
import torch
from fusednorm import reference
from torch.utils._python_dispatch import TorchDispatchMode

OPS = ("layer_norm", "rms_norm", "group_norm", "channels_last")


class Kernels(TorchDispatchMode):
    """Notes the operators of torch that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


def of_rows(op):
    return op in ("layer_norm", "rms_norm")


def tensors(op, dtype=torch.float32, parameter_dtype=None, mean=0.0):
    """x, weight, bias, residual and dy, as `op` takes them."""
    shape = (70, 96) if of_rows(op) else (3, 8, 7, 9)
    x, residual, dy = (torch.randn(shape) for _ in range(3))
    x = x + mean
    if op == "channels_last":
        x, residual, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, residual, dy))
    weight, bias = torch.randn(2, 96 if of_rows(op) else 8).to(parameter_dtype or dtype)
    return x.to(dtype), weight, None if op == "rms_norm" else bias, residual.to(dtype), dy.to(dtype)


def call(op, x, weight, bias, residual=None, **options):
    """The function's results, y and, with a residual, the sum."""
    name = "group_norm" if op == "channels_last" else op
    function = getattr(fusednorm, name if residual is None else f"add_{name}")
    sums = () if residual is None else (residual,)
    groups = () if of_rows(op) else (2,)
    parameters = (weight,) if op == "rms_norm" else (weight, bias)
    result = function(x, *sums, *groups, *parameters, **options)
    return (result,) if residual is None else tuple(result)


def exact(op, x, weight, bias, residual, dy, dsum=None, **options):
    """float64 y, sum, dx, dweight, dbias and dresidual."""
    name = "group_norm" if op == "channels_last" else op
    groups = () if of_rows(op) else (2,)
    parameters = (weight,) if op == "rms_norm" else (weight, bias)
    options |= {"residual": residual, "precision": torch.float64}

    def wide(t):
        return None if t is None else t.double()

    given = [wide(t) for t in parameters]
    if residual is not None:
        options["residual"] = residual.double()
    forward = getattr(reference, f"{name}_forward")(x.double(), *groups, *given, **options)
    backward = getattr(reference, f"{name}_backward")(
        dy.double(), x.double(), *groups, *given, dresidual_out=wide(dsum), **options
    )
    return forward.y, forward.residual_out, backward.dx, backward.dweight, backward.dbias, backward.dresidual
