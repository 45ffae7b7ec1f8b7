import pytest
import torch

from benchmarks.providers.tutorial import can_fit_block, layer_norm_forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cols", [1, 100, 256, 1001])
def test_a_row_is_normalised(device, dtype, cols):
    x = torch.randn(5, cols, device=device, dtype=dtype) + 3
    weight, bias = (torch.randn(cols, device=device, dtype=dtype) for _ in range(2))
    expected = torch.nn.functional.layer_norm(x.double(), (cols,), weight.double(), bias.double(), 1e-5)
    actual = layer_norm_forward(x, weight, bias, 1e-5)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=2e-3, atol=2e-3 if dtype == torch.float16 else 1e-5)


def test_rows_of_more_than_64_kb_are_declined(device):
    half = torch.empty(1, 32769, device=device, dtype=torch.float16)
    assert not can_fit_block(half)
    assert can_fit_block(half[:, :32768])
    assert not can_fit_block(half[:, :16385].float())
