"""The oracle of float8 rows, against a search among all numbers of the type."""

import pytest
import torch
from fusednorm import reference
from fusednorm.reference.float8 import quantise_rows
from fusednorm.tensors.arrays import FLOAT8

NUMBERS = torch.arange(256, dtype=torch.uint8).view(FLOAT8).double()
NUMBERS = NUMBERS[torch.isfinite(NUMBERS)]


def test_every_element_becomes_the_nearest_number_of_the_type():
    y = torch.randn(40, 50, dtype=torch.float64) * torch.logspace(-6, 6, 50, dtype=torch.float64)
    values, scale = quantise_rows(y)
    torch.testing.assert_close(scale, y.abs().amax(-1) / 448)
    quotient = (y / scale[:, None]).unsqueeze(-1)
    nearest = (quotient - NUMBERS).abs().amin(-1)
    torch.testing.assert_close((quotient.squeeze(-1) - values.double()).abs(), nearest, rtol=1e-6, atol=1e-9)


def test_ties_go_to_the_even_number():
    values, scale = quantise_rows(torch.tensor([[448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10]]))
    assert scale.tolist() == [1.0]
    assert values.float().tolist() == [[448.0, 16.0, 20.0, -16.0, 0.0, 2.0**-8]]


def test_rows_of_zeros_and_rows_that_are_not_finite():
    infinity, nan = float("inf"), float("nan")
    values, scale = quantise_rows(torch.tensor([[0.0, 0.0], [1.0, nan], [infinity, 1.0]]))
    assert scale[[0, 2]].tolist() == [2.0**-126, infinity]
    assert values[0].float().tolist() == [0.0, 0.0]
    assert torch.isnan(values[1:].float() * scale[1:, None]).all()


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_the_scale_has_the_shape_of_the_rows_and_the_precision_of_the_sums(op):
    x = torch.randn(2, 3, 8)
    forward = getattr(reference, f"{op}_forward")
    result = forward(x, out_dtype=FLOAT8)
    assert (result.y.dtype, result.y_scale.dtype) == (FLOAT8, torch.float32)
    assert (result.y.shape, result.y_scale.shape) == (x.shape, x.shape[:-1])
    assert forward(x, out_dtype=FLOAT8, precision=torch.float64).y_scale.dtype == torch.float64
    torch.testing.assert_close(result.y.float() * result.y_scale[..., None], forward(x).y, rtol=2**-4, atol=0.01)
    assert forward(x).y_scale is None
