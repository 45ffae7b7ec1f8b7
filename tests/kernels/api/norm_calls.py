"""Calls of the differentiable functions, their inputs, and who watches them."""

import fusednorm
import torch
from torch.utils._python_dispatch import TorchDispatchMode


def random(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


CALLS = {
    "layer_norm": lambda x, w, b, r, **options: fusednorm.layer_norm(x, w, b, **options),
    "rms_norm": lambda x, w, b, r, **options: fusednorm.rms_norm(x, w, **options),
    "layer_norm around zero": lambda x, w, b, r: fusednorm.layer_norm(x, w, b, weight_offset=1.0),
    "layer_norm of heads": lambda x, w, b, r: fusednorm.layer_norm(x, w, b),
    "add_rms_norm of heads": lambda x, w, b, r: fusednorm.add_rms_norm(x, r, w),
    "add_layer_norm of samples": lambda x, w, b, r, **options: fusednorm.add_layer_norm(
        x, r, scale=w, shift=b, gate=b, **options
    ),
    "add_rms_norm of samples": lambda x, w, b, r: fusednorm.add_rms_norm(x, r, scale=w, shift=b, gate=b),
    "group_norm": lambda x, w, b, r, **options: fusednorm.group_norm(x, 2, w, b, **options),
    "add_layer_norm": lambda x, w, b, r, **options: fusednorm.add_layer_norm(x, r, w, b, **options),
    "add_rms_norm": lambda x, w, b, r, **options: fusednorm.add_rms_norm(x, r, w, **options),
    "add_group_norm": lambda x, w, b, r, **options: fusednorm.add_group_norm(x, r, 2, w, b, **options),
}


def inputs(name, device="cpu", dtype=torch.float64):
    shape = (2, 4, 3) if "group" in name else (2, 3, 4) if " of " in name else (3, 4)
    parameter = (3, 4) if "heads" in name else (2, 4) if "samples" in name else (4,)
    return [random(*s, device=device, dtype=dtype) for s in (shape, parameter, parameter, shape)]


class Dispatched(TorchDispatchMode):
    """Notes the operators of this library that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fusednorm":
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))
