import pytest
import torch
from fusednorm.arguments.checks import ACTIVATIONS

from benchmarks.workload.variants import VARIANTS


@pytest.mark.parametrize(
    ("variant", "pass_", "tensors"),
    [
        ("plain", "forward", 2),
        ("plain", "backward", 3),
        ("residual", "forward", 4),
        ("residual", "backward", 4),
        ("silu", "forward", 2),
        ("dropout", "forward", 2),
        ("dropout", "backward", 3),
        ("residual_dropout", "forward", 4),
        ("residual_float32", "forward", 6),
        ("residual_float32", "backward", 7),
        ("float8", "forward", 1.5),
        ("per_head", "forward", 2),
        ("per_head", "backward", 3),
        ("chain", "forward", 2),
        ("no_affine", "backward", 3),
        ("scale_shift_silu", "forward", 2),
        ("scale_shift_silu", "backward", 3),
        ("adaptive", "forward", 2),
        ("adaptive", "backward", 3),
        ("gated", "forward", 4),
        ("gated", "backward", 6),
    ],
)
def test_fewest_bytes_are_whole_tensors_once_each(variant, pass_, tensors):
    assert VARIANTS[variant].compute_min_bytes(pass_, 1000, torch.float16) == tensors * 2000


def test_a_stream_of_x_s_own_dtype_has_no_gradient_of_its_own():
    assert VARIANTS["residual_float32"].compute_min_bytes("backward", 1000, torch.float32) == 4 * 4000


def test_activations_are_the_library_s():
    assert {variant.activation for variant in VARIANTS.values()} <= set(ACTIVATIONS)
