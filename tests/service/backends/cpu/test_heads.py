"""Rows whose heads have parameters of their own: alone and in company, in whole tokens and cut into pieces."""

import pytest
import torch
from fusednorm.cpu import batch_invariant, chunks
from normserve.backends.cpu.backend import CpuBackend
from normserve.backends.library_calls import ResidentParameters
from normserve.jobs.job import Batch, NormJob, NormSpec, Op, PassDirection

from tests.service.jobs.fake_jobs import layer
from tests.service.memory.host_tensors import back, host

FORWARD = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, eps=1e-5, stats=True)
HEADS, COLS = 3, 8


@pytest.fixture
def parameters():
    torch.manual_seed(2)
    return {"weight": torch.randn(HEADS, COLS), "bias": torch.randn(HEADS, COLS).half()}


def jobs_of(parameters, shapes, registered=None):
    sent = {} if registered else {name: host(tensor) for name, tensor in parameters.items()}
    return [NormJob(FORWARD, {"x": host(torch.randn(*shape)), **sent}, registered) for shape in shapes]


@pytest.mark.parametrize("is_registered", [False, True])
def test_tokens_of_several_requests_share_a_launch_with_the_bits_that_they_have_alone(parameters, is_registered):
    resident = ResidentParameters(*parameters.values())
    registered = layer(size=COLS, heads=HEADS, backend_parameters=resident) if is_registered else None
    shapes = [(HEADS, COLS), (2, HEADS, COLS), (2, 1, HEADS, COLS)]
    jobs = jobs_of(parameters, shapes, registered)
    assert len({job.compute_batch_class() for job in jobs}) == 1
    backend = CpuBackend(1)
    together = backend.run(Batch(tuple(jobs))).results
    for job, shape, share in zip(jobs, shapes, together, strict=True):
        (alone,) = backend.run(Batch((job,))).results
        assert {name: tensor.shape for name, tensor in share.items()} == {
            "y": shape,
            "mean": shape[:-1],
            "rstd": shape[:-1],
        }
        assert {name: bytes(each.data) for name, each in share.items()} == {
            name: bytes(each.data) for name, each in alone.items()
        }
        plain = torch.nn.functional.layer_norm(back(job.x), (COLS,))
        right = plain * parameters["weight"] + parameters["bias"].float()
        torch.testing.assert_close(back(share["y"]), right)


def test_parameters_of_one_head_are_not_those_of_all_rows(parameters):
    one = {name: tensor[:1] for name, tensor in parameters.items()}
    common = {name: tensor[0] for name, tensor in parameters.items()}
    (of_head,), (of_all,) = jobs_of(one, [(4, 1, COLS)]), jobs_of(common, [(4, 1, COLS)])
    assert of_head.compute_batch_class() != of_all.compute_batch_class()
    assert of_head.compute_kernel_class() != of_all.compute_kernel_class()


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("elements", [1, COLS * 2, COLS * 4, COLS * HEADS * 2 + 5])
def test_bits_are_those_of_the_whole(op, elements, parameters, monkeypatch):
    x, dy, outside = (torch.randn(5, HEADS, COLS) for _ in range(3))
    residual = torch.randn(x.shape).bfloat16()
    options = {"weight": parameters["weight"], "residual": residual, "weight_offset": 1.0, "activation": "silu"}
    options |= {"dropout": 0.3, "seed": 4} | ({"bias": parameters["bias"]} if op == "layer_norm" else {})
    results = []
    for most in (2**20, elements):
        monkeypatch.setattr(chunks, "PIECE_ELEMENTS", most)
        forward = getattr(batch_invariant, f"{op}_forward")(x, stats=True, **options)
        results.append(
            (forward, getattr(batch_invariant, f"{op}_backward")(dy, x, dresidual_out=outside, **options))
        )
    for whole, cut in zip(*results, strict=True):
        for name, tensor in whole._asdict().items():
            if tensor is None:
                assert getattr(cut, name) is None
            elif name in ("dweight", "dbias"):
                torch.testing.assert_close(getattr(cut, name), tensor, rtol=1e-4, atol=1e-4)
            else:
                assert torch.equal(getattr(cut, name), tensor), name
