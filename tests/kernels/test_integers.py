"""Division and powers of two: the same as Triton's."""

import pytest
import triton
from fusednorm.integers import cdiv, compute_vector_width, next_power_of_2


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 127, 128, 129, 2**31 - 1, 2**31, 2**31 + 1])
def test_powers_of_two_are_triton_s(number):
    assert next_power_of_2(number) == triton.next_power_of_2(number)
    assert next_power_of_2(0) == 1


@pytest.mark.parametrize(("dividend", "divisor"), [(0, 3), (1, 3), (3, 3), (4, 3), (2**40 + 1, 2**20)])
def test_division_is_triton_s(dividend, divisor):
    assert cdiv(dividend, divisor) == triton.cdiv(dividend, divisor)


@pytest.mark.parametrize(
    ("sizes", "width"), [((), 8), ((64,), 8), ((64, 20), 4), ((64, 20, 6), 2), ((64, 7), 1), ((0, 64), 8)]
)
def test_a_vector_divides_every_size(sizes, width):
    assert compute_vector_width(8, *sizes) == width
