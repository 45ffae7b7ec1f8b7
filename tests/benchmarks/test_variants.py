import pytest
from fusednorm.epilogue import ACTIVATIONS

from benchmarks.variants import VARIANTS


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
    ],
)
def test_fewest_bytes_are_whole_tensors_once_each(variant, pass_, tensors):
    assert VARIANTS[variant].min_bytes(pass_, numel=1000, size=2) == tensors * 2000


def test_activations_are_the_library_s():
    assert {variant.activation for variant in VARIANTS.values()} <= set(ACTIVATIONS)
