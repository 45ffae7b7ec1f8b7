"""What the device functions of activations do with a name that they lack."""

import pytest
import torch
import triton
import triton.language as tl
from fusednorm.arguments.checks import ACTIVATIONS
from fusednorm.jit.epilogue import activate, activate_for_dtype, differentiate_activation
from fusednorm.ops.group_norm.gradient_tiles import backpropagate_scaled_epilogue
from triton.errors import TritonError


@triton.jit
def _apply_kernel(result_ptr, FUNCTION: tl.constexpr, ACTIVATION: tl.constexpr):
    at = tl.arange(0, 16)
    z = tl.load(result_ptr + at)
    if FUNCTION == "activate":
        y = activate(z, 0.25, ACTIVATION)
    elif FUNCTION == "activate_for_dtype":
        y = activate_for_dtype(z, 0.25, tl.bfloat16, ACTIVATION)
    elif FUNCTION == "differentiate_activation":
        y = differentiate_activation(z, 0.25, ACTIVATION)
    else:
        y = backpropagate_scaled_epilogue(z, z, 1.0, 0.0, 0, at, 0, 0, 1.0, 0.25, ACTIVATION, False, 2.0)
    tl.store(result_ptr + at, y)


@pytest.mark.parametrize(
    ("function", "known"),
    [
        ("activate", ACTIVATIONS),
        ("activate_for_dtype", ACTIVATIONS),
        ("differentiate_activation", ACTIVATIONS),
        ("backpropagate_scaled_epilogue", ("none", "silu", "gelu_tanh")),
    ],
)
def test_a_name_without_a_branch_is_an_error(device, function, known):
    result = torch.zeros(16, device=device)
    for activation in known:
        _apply_kernel[(1,)](result, function, activation)
    with pytest.raises(TritonError, match=r"activation"):
        _apply_kernel[(1,)](result, function, "mish")
