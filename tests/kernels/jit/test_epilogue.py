"""Device functions of the steps after the affine one: names of activations, and seeds of dropout."""

import pytest
import torch
import triton
import triton.language as tl
from fusednorm.arguments.checks import ACTIVATIONS
from fusednorm.jit.epilogue import activate, activate_for_dtype, compute_keep_mask, differentiate_activation
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


@triton.jit
def _keep_kernel(kept_ptr, seed, row: tl.int64, threshold: tl.int64):
    at = tl.arange(0, 64)
    tl.store(kept_ptr + at, compute_keep_mask(seed, row, at, threshold).to(tl.int32))


@pytest.mark.parametrize("seed", [7, (1 << 40) + 1, -3])
def test_a_seed_in_memory_gives_the_mask_that_it_gives_as_a_number(device, seed):
    kept, wanted, other = torch.zeros(3, 64, dtype=torch.int32, device=device)
    _keep_kernel[(1,)](wanted, seed, 5, 1 << 31)
    _keep_kernel[(1,)](kept, torch.tensor([seed], device=device), 5, 1 << 31)
    _keep_kernel[(1,)](other, torch.tensor([seed + 1], device=device), 5, 1 << 31)
    assert torch.equal(kept, wanted)
    assert not torch.equal(other, wanted)
    assert 0 < int(kept.sum()) < 64
