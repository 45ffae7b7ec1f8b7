"""Lists of tensors that cannot be concatenated into one call over shared memory."""

import numpy as np
import pytest
import torch
from normserve.client.calls.concatenation import TensorListCall
from normserve.client.calls.operations import layer_norm_backward
from normserve.memory.tensors import DType, HostTensor

X = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("dy", "x", "options", "text"),
    [
        ([X], X, {}, "x must be a list of tensors, as dy is$"),
        ([X], [X, X], {}, "dy must be a list of as many tensors as x, 2, got 1$"),
        (X, [X], {}, "dy must be a list of as many tensors as x, 1, got ndarray$"),
        ([X[:1]], [X], {}, r"dy.0 must be \[2, 3\], got \[1, 3\]$"),
        ([X, X], [X, X[:, :2]], {}, r"x.1 must be \[2, 3\], got \[2, 2\]$"),
        ([X[0]], [X[0]], {}, r"x.0 must have at least two axes, the first of rows or samples, got \[3\]$"),
        ([X], [X], {"scale": [X[0]]}, r"scale.0 must have at least two axes, .*, got \[3\]$"),
        ([X, X.astype("f2")], [X, X], {}, r"dy.1 must be float32 as dy.0 is, got float16$"),
    ],
)
def test_lists_that_do_not_fit_one_another_are_refused(dy, x, options, text):
    with pytest.raises(ValueError, match=f"^{text}"):
        list(TensorListCall(layer_norm_backward, (dy, x), options).iterate_plans())


def test_arrays_that_cannot_be_concatenated_are_refused():
    with pytest.raises(ValueError, match=r"^x must have torch tensors alone or none .*, got ndarray and Tensor$"):
        list(TensorListCall(layer_norm_backward, ([X, X], [X, torch.zeros(2, 3)]), {}).iterate_plans())
    described = HostTensor(DType.FLOAT32, (2, 3), memoryview(X).cast("B"))
    with pytest.raises(TypeError, match=r"^x must be a list of arrays over shared memory, got a HostTensor in it$"):
        TensorListCall(layer_norm_backward, ([X], [described]), {})
