"""Several LayerNorms in a row on the CPU against the oracle in float64."""

from itertools import product

import pytest
import torch
from fusednorm.cpu import batch_invariant, chunks
from fusednorm.reference.chain import layer_norm_chain as right
from normserve.backends.cpu.backend import CpuBackend
from normserve.jobs.job import Batch, NormJob, NormSpec, Op, PassDirection

from tests.sampling import mark_rest_slow
from tests.service.memory.host_tensors import DTYPES, back, host


def parameters(cols: int, *present: bool) -> list[torch.Tensor | None]:
    return [torch.randn(cols).to(list(DTYPES)[n % len(DTYPES)]) if here else None for n, here in enumerate(present)]


def job(x: torch.Tensor, **parameters: torch.Tensor) -> NormJob:
    named = {name.replace("_", "."): tensor for name, tensor in parameters.items()}
    spec = NormSpec(Op.LAYER_NORM_CHAIN, PassDirection.FORWARD, 1e-5)
    return NormJob(spec, {name: host(tensor) for name, tensor in {"x": x, **named}.items()})


@pytest.mark.parametrize(
    ("norms", "shape", "dtype"), mark_rest_slow(product([1, 3, 8], [(1, 1), (5, 33), (3, 200_000)], DTYPES))
)
def test_it_is_the_oracles_result(dtype, shape, norms):
    torch.manual_seed(norms)
    x = (torch.randn(shape) * 2 + 1).to(dtype)
    weights = parameters(shape[1], *[n % 3 != 1 for n in range(norms)])
    biases = parameters(shape[1], *[n % 2 == 0 for n in range(norms)])
    exact = right(x, weights, biases, eps=1e-3, out_dtype=torch.float64, precision=torch.float64)
    got = batch_invariant.layer_norm_chain(x, weights, biases, eps=1e-3, out_dtype=torch.float32)
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4 * max(1.0, exact.abs().max().item()))
    assert torch.equal(batch_invariant.layer_norm_chain(x, weights, biases, eps=1e-3), got.to(dtype))


def test_rows_have_the_same_bits_alone_and_together(monkeypatch):
    given = {"weight_0": torch.randn(48), "bias_2": torch.randn(48).half()}
    jobs = tuple(job(torch.randn(rows, 48), **given) for rows in (1, 4, 2))
    alone = [back(CpuBackend(1).run(Batch((each,))).results[0]["y"]) for each in jobs]
    monkeypatch.setattr(chunks, "PIECE_ELEMENTS", 96)
    together = CpuBackend(1).run(Batch(jobs)).results
    for got, want in zip(together, alone, strict=True):
        assert torch.equal(back(got["y"]), want)


def test_large_rows_are_written_over_what_came():
    x = torch.randn(600, 1000)
    given = {"weight_0": torch.randn(1000), "weight_1": torch.randn(1000)}
    expected = back(CpuBackend(1).run(Batch((job(x, **given),))).results[0]["y"])
    made = job(x.clone(), **given)
    reused = NormJob(made.spec, made.tensors, may_overwrite=True)
    got = CpuBackend(1).run(Batch((reused,))).results[0]["y"]
    assert torch.equal(back(got), expected)
    assert torch.equal(back(made.tensors["x"]), expected)


def test_no_rows_at_all():
    (got,) = CpuBackend(1).run(Batch((job(torch.randn(0, 4), weight_1=torch.randn(4)),))).results
    assert got["y"].shape == (0, 4)
