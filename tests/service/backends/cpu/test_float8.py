"""Rows in float8_e4m3fn, each with a scale: the bits of the library's oracle, whatever comes along."""

import pytest
import torch
from fusednorm.cpu import chunks
from fusednorm.cpu.batch_invariant.row_norms import scale_rows_for_float8_
from fusednorm.reference.float8 import quantise_rows
from normserve.backends.cpu.backend import CpuBackend
from normserve.jobs.job import Batch, NormJob, NormSpec, Op, PassDirection
from normserve.memory.tensors import DType

from tests.service.memory.host_tensors import back, host


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def run(op: Op, out_dtype: DType, *xs: torch.Tensor, **tensors: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    spec = NormSpec(op, PassDirection.FORWARD, 1e-5, activation="silu", out_dtype=out_dtype)
    sent = {name: host(tensor) for name, tensor in tensors.items()}
    jobs = tuple(NormJob(spec, {"x": host(x), **sent}) for x in xs)
    return [{n: back(t) for n, t in each.items()} for each in CpuBackend(1).run(Batch(jobs)).results]


@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (2, 3, 1000), (3, 200_000)])
@pytest.mark.parametrize("op", [Op.LAYER_NORM, Op.RMS_NORM])
def test_it_is_the_float32_result_quantised_as_the_library_does(op, shape):
    torch.manual_seed(4)
    x, weight = torch.randn(shape).half(), torch.randn(shape[-1])
    (got,) = run(op, DType.FLOAT8_E4M3FN, x, weight=weight)
    (plain,) = run(op, DType.FLOAT32, x, weight=weight)
    y, scale = quantise_rows(plain["y"])
    assert got.keys() == {"y", "scale"}
    assert torch.equal(bits(got["y"]), bits(y))
    assert torch.equal(got["scale"], scale)


def test_rows_have_the_same_bits_alone_and_together(monkeypatch):
    xs = [torch.randn(rows, 48) for rows in (1, 4, 2)]
    alone = [run(Op.LAYER_NORM, DType.FLOAT8_E4M3FN, x)[0] for x in xs]
    monkeypatch.setattr(chunks, "PIECE_ELEMENTS", 96)
    for got, want in zip(run(Op.LAYER_NORM, DType.FLOAT8_E4M3FN, *xs), alone, strict=True):
        assert torch.equal(bits(got["y"]), bits(want["y"]))
        assert torch.equal(got["scale"], want["scale"])


def test_rows_of_zeros_and_of_what_is_not_finite():
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[0.0, 0.0], [1e-45, 0.0], [1.0, nan], [inf, 1.0], [-inf, nan], [-448.0, 0.1]])
    y, scale = quantise_rows(rows)
    mine = rows.clone()
    found = scale_rows_for_float8_(mine)
    assert torch.equal(bits(mine.to(torch.float8_e4m3fn)), bits(y))
    torch.testing.assert_close(found, scale, rtol=0, atol=0, equal_nan=True)


def test_no_rows():
    spec = NormSpec(Op.RMS_NORM, PassDirection.FORWARD, 1e-6, out_dtype=DType.FLOAT8_E4M3FN)
    (got,) = CpuBackend(1).run(Batch((NormJob(spec, {"x": host(torch.empty(0, 3, 8))}),))).results
    assert (got["y"].dtype, got["y"].shape) == (DType.FLOAT8_E4M3FN, (0, 3, 8))
    assert (got["scale"].dtype, got["scale"].shape) == (DType.FLOAT32, (0, 3))
