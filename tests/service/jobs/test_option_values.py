"""Values of options as kernels can use them."""

import math

import pytest
from normserve.jobs.option_values import MAX_FLOAT32, parse_eps, parse_slope


@pytest.mark.parametrize("parse", [parse_eps, parse_slope])
def test_the_largest_float32_as_it_is_printed(parse):
    assert parse("3.4028235e38") == MAX_FLOAT32
    with pytest.raises(ValueError, match="float32"):
        parse("3.5e38")


def test_slopes_that_are_equal_have_one_sign():
    assert parse_slope("-3.4028235e38") == -MAX_FLOAT32
    assert math.copysign(1.0, parse_slope("-0")) == 1.0
