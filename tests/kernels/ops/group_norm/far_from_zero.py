"""Values far from zero, and what results over them may differ by from float64, in units of 2^-24."""

import fusednorm.api.group_norm as ours
import torch

from tests.kernels.ops.group_norm.cases import channels_last

UNIT = 2.0**-24


def far_from_zero(shape, mean, device):
    """Normal values about `mean`, rounded to float32 once."""
    return (torch.randn(shape, dtype=torch.float64) + mean).float().to(device)


def exact_statistics(x, groups):
    """Mean and variance of the float32 values, in float64."""
    values = x.double().reshape(x.shape[0], groups, -1)
    return values.mean(2), values.var(2, correction=0)


def check_variance(rstd, exact, eps, most_units):
    units = ((rstd.double() ** -2 - eps) / exact - 1).abs().max() / UNIT
    assert units <= most_units, f"the variance is {units:.1f} units of 2^-24 off"


def check_forward(shape, groups, mean, last, device, most_units, **options):
    """Statistics and y of a forward pass over values about `mean`."""
    x = far_from_zero(shape, mean, device)
    exact_mean, variance = exact_statistics(x, groups)
    weight, bias = torch.randn(2, shape[1], device=device)
    eps = 1e-9
    given = channels_last(x) if last else x
    actual = ours.group_norm_forward(given, groups, weight, bias, eps=eps, stats=True, **options)
    check_variance(actual.rstd, variance, eps, most_units)
    torch.testing.assert_close(actual.mean.double(), exact_mean, rtol=1.01 * UNIT, atol=4 * UNIT)
    centred = x.double().reshape(shape[0], groups, -1) - exact_mean[..., None]
    xhat = (centred * (variance + eps).rsqrt()[..., None]).reshape(shape)
    of_channel = (1, -1, *(1 for _ in shape[2:]))
    y = xhat * weight.double().view(of_channel) + bias.double().view(of_channel)
    torch.testing.assert_close(actual.y.double(), y, rtol=most_units * UNIT, atol=2 * most_units * UNIT)
