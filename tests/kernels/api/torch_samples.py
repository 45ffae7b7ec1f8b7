"""Torch's own samples of its norms, written to a file: `python -m tests.kernels.api.torch_samples FILE`.

A process of its own, for what torch tests itself with changes torch where it is imported.
"""

import importlib.util
import sys
import types
import unittest
import warnings

import torch

NAMES = ("native_layer_norm", "nn.functional.layer_norm", "nn.functional.rms_norm", "nn.functional.group_norm")


def operations():
    """Torch's descriptions of its norms."""
    if importlib.util.find_spec("expecttest") is None:
        # Only the base class of tests that are not run here.
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

        return [operation for operation in op_db if operation.name in NAMES]


def described(operation, sample, **more):
    return {"name": operation.name, "x": sample.input, "args": sample.args, "kwargs": sample.kwargs, **more}


def samples():
    """What torch computes, contiguous and not, in each of its dtypes, and what it refuses."""
    for operation in operations():
        for dtype in operation.dtypes:
            for sample in operation.reference_inputs("cpu", dtype):
                yield described(operation, sample, refused=False)
                if sample.input.dim() > 1:
                    yield described(operation, sample.noncontiguous(), refused=False)
        if operation.error_inputs_func is not None:
            for error in operation.error_inputs("cpu"):
                yield described(operation, error.sample_input, refused=True)


if __name__ == "__main__":
    torch.manual_seed(20)
    torch.save(list(samples()), sys.argv[1])
