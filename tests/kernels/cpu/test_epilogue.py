"""Activations in place: the bits of an element wherever it is, and the right values."""

import pytest
import torch
from fusednorm.arguments.checks import ACTIVATIONS
from fusednorm.cpu import epilogue
from fusednorm.tensors.activations import activation_of

SLOPE = 0.25
NAMES = sorted(set(ACTIVATIONS) - {"none"})


@pytest.fixture(autouse=True, params=[1, 3, 7])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def computed(name, z, dy):
    """The activation and the gradient of z."""
    gradient = epilogue.backpropagate_activation_into_z_(dy, z.clone(), name, SLOPE)
    return epilogue.activate_(z.clone(), name, SLOPE), gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_the_position(name, dtype):
    torch.manual_seed(3)
    z, dy = torch.randn(2, 150_001, dtype=dtype)
    whole = computed(name, z, dy)
    for start, count in ((0, 1), (0, 64), (5, 31), (7, 33), (32, 500), (99, 40_000), (20_000, 129_999)):
        part = slice(start, start + count)
        for got, want in zip(computed(name, z[part], dy[part]), whole, strict=True):
            assert torch.equal(got, want[part])


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_formulas(name):
    torch.manual_seed(4)
    z, dy = torch.randn(2, 3, 5, 7, 9, dtype=torch.float64)
    z, dy = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (z, dy))
    activated, gradient = computed(name, z, dy)
    torch.testing.assert_close(activated, activation_of(name, SLOPE).apply(z))
    torch.testing.assert_close(gradient, dy * activation_of(name, SLOPE).derivative(z))


def test_without_an_activation_nothing_is_computed():
    z = torch.randn(5)
    assert epilogue.activate_(z, "none", SLOPE) is z
