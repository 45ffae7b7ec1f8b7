import numpy as np
import pytest
import torch
from normload.load.element_types import round_to_tensor, to_float64
from normserve.client import DType, HostTensor

VALUES = np.concatenate(
    [np.random.default_rng(0).normal(0, 10, 1000), [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 3e38, 1e-38]]
)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_rounding_is_torchs(dtype):
    as_float32 = torch.from_numpy(VALUES.astype(np.float32))
    expected = as_float32.to(getattr(torch, dtype.value)).double().numpy()
    tensor = round_to_tensor(VALUES, dtype)
    assert tensor.nbytes == tensor.data.nbytes
    np.testing.assert_array_equal(to_float64(tensor), expected)


def test_half_precision_and_shapes():
    tensor = round_to_tensor(np.arange(6.0).reshape(2, 3), DType.FLOAT16)
    assert (tensor.shape, tensor.nbytes) == ((2, 3), 12)
    np.testing.assert_array_equal(to_float64(tensor), np.arange(6.0).reshape(2, 3))


def test_every_value_of_float8_is_torchs():
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(to_float64(HostTensor(DType.FLOAT8_E4M3FN, (256,), codes.data)), expected)
