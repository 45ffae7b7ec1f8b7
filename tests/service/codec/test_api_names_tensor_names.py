"""Names of tensors: what belongs to a whole launch, and how many norms a chain has."""

import pytest
from fusednorm.api.chain import MAX_NORMS as OF_KERNELS
from normserve.codec.api_names import CHAIN_PARAMETERS, MAX_NORMS, count_norms, is_parameter


def test_a_chain_is_as_long_as_the_kernels_take_it():
    assert MAX_NORMS == OF_KERNELS
    assert len(set(CHAIN_PARAMETERS)) == 2 * MAX_NORMS


def test_parameters_are_those_of_one_norm_or_of_a_chain():
    assert all(map(is_parameter, ("weight", "bias", *CHAIN_PARAMETERS)))
    assert not any(map(is_parameter, ("x", "dy", "scale", "residual", "dweight")))


@pytest.mark.parametrize(
    ("names", "count"),
    [
        ((), 0),
        (("x",), 0),
        (("x", "weight.0"), 1),
        (("bias.2", "weight.0"), 3),
        (("weight.7",), 8),
        (("weight",), 0),
    ],
)
def test_norms_without_parameters_count_before_the_last_that_has_some(names, count):
    assert count_norms(names) == count
