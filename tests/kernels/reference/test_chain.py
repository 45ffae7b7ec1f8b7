"""The oracle of a chain of LayerNorms against torch's own, one after another."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import KernelInputError, reference
from fusednorm.reference.chain import layer_norm_chain


def test_it_is_found_without_an_import_of_its_own():
    assert reference.chain.layer_norm_chain is layer_norm_chain


def test_agrees_with_torch_in_float64():
    x, *parameters = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 2, 8), (8,), (8,), (8,)))
    first = F.layer_norm(x, (8,), parameters[0], parameters[1], 0.1)
    expected = F.layer_norm(first, (8,), None, parameters[2], 0.1)
    y = layer_norm_chain(x, [parameters[0], None], [parameters[1], parameters[2]], eps=0.1, precision=torch.float64)
    torch.testing.assert_close(y, expected)
    alone = layer_norm_chain(x, parameters[:1], precision=torch.float64)
    torch.testing.assert_close(alone, F.layer_norm(x, (8,), parameters[0]))


def test_only_the_result_is_rounded():
    x, weights = torch.randn(4, 64).half(), [torch.randn(64), torch.randn(64).half()]
    y = layer_norm_chain(x, weights)
    assert y.dtype == torch.float16
    assert torch.equal(y, layer_norm_chain(x.float(), weights).half())
    assert layer_norm_chain(x, weights, out_dtype=torch.bfloat16).dtype == torch.bfloat16


def test_weights_and_biases_come_in_equal_numbers():
    with pytest.raises(KernelInputError, match="biases must be as many as weights, 2, got 1"):
        layer_norm_chain(torch.randn(2, 4), [None, None], [None])


def test_parameters_may_be_rows_of_one_tensor_and_there_is_a_norm():
    x, weights = torch.randn(2, 4), torch.randn(2, 4)
    assert torch.equal(layer_norm_chain(x, weights), layer_norm_chain(x, list(weights)))
    with pytest.raises(KernelInputError, match="weights must hold at least 1 norm"):
        layer_norm_chain(x, [])
