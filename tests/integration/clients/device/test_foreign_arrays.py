"""Arrays of other libraries on the server's GPU: they stay there, and so do their results; needs a GPU."""

import numpy as np
import pytest
import torch

from tests.integration.clients.device.serving import metric, random
from tests.service.client.harness.foreign_library import ForeignArray

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_bits_of_torchs(serving, http, local, until, dtype):
    x, weight = random(37, 1024, dtype=dtype), random(1024, seed=2)
    right = http.layer_norm(x, weight, stats=True)
    before = metric(serving, "requests_total", 'transport="local_cuda"')
    got = local.layer_norm(ForeignArray(x), ForeignArray(weight), stats=True)
    for name in ("y", "mean", "rstd"):
        found = getattr(got, name)
        assert type(found) is ForeignArray
        assert torch.equal(found.memory, getattr(right, name))
    from_list = local.layer_norm([ForeignArray(x), ForeignArray(x[:5])], weight)
    assert torch.equal(from_list.y[1].memory, right.y[:5])
    until(lambda: metric(serving, "requests_total", 'transport="local_cuda"') == before + 2)


def test_arrays_of_jax(serving, http, local, monkeypatch, until):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    before = metric(serving, "requests_total", 'transport="local_cuda"')
    compute = jax.jit(lambda each: (each * 2).sum(axis=0))
    for number, dtype in enumerate(("float32", "bfloat16") * 10):
        x = jax.random.normal(jax.random.key(number), (257, 1024)).astype(dtype)
        got = local.rms_norm(x, jax.numpy.ones(1024), stats=True)
        for found in (got.y, got.rstd):
            assert isinstance(found, jax.Array)
            assert found.device == x.device
        right = http.rms_norm(x, jax.numpy.ones(1024))
        # The result is deleted while JAX's kernels may still read it, and the next call may take its memory.
        sums = compute(got.y)
        del got, found
        np.testing.assert_array_equal(np.asarray(sums), np.asarray(compute(right.y)))
    until(lambda: metric(serving, "requests_total", 'transport="local_cuda"') == before + 20)
