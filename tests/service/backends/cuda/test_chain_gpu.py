"""Several LayerNorms in a row on a GPU: jobs of their own and in one launch."""

import pytest
import torch
from fusednorm.reference.chain import layer_norm_chain
from normserve.jobs.job import NormJob, NormSpec, Op, PassDirection

from tests.service.backends.cuda.on_gpu import backend, run
from tests.service.memory.host_tensors import DTYPES, host

__all__ = ["backend"]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cols", [100, 1024, 40_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_oracles_result_alone_and_together(backend, dtype, cols):
    named = {"weight.0": torch.randn(cols), "bias.1": torch.randn(cols).half(), "weight.2": torch.randn(cols)}
    spec = NormSpec(Op.LAYER_NORM_CHAIN, PassDirection.FORWARD, 1e-5)
    sent = {name: host(tensor) for name, tensor in named.items()}
    xs = [torch.randn(rows, cols).to(dtype) for rows in (1, 2, 33)]
    jobs = [NormJob(spec, {"x": host(x), **sent}) for x in xs]
    weights, biases = ([named.get(f"{name}.{n}") for n in range(3)] for name in ("weight", "bias"))
    for x, job, together in zip(xs, jobs, run(backend, *jobs), strict=True):
        (alone,) = run(backend, job)
        assert torch.equal(alone["y"], together["y"])
        exact = layer_norm_chain(x, weights, biases, out_dtype=torch.float64, precision=torch.float64)
        tolerance = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
        torch.testing.assert_close(alone["y"].double(), exact, rtol=tolerance, atol=tolerance)
