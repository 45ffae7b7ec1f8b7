"""Jobs over channels, and with a scale, shift and gate, on a GPU: the bits of the library's own call."""

from itertools import product

import fusednorm
import pytest
import torch
from normserve.jobs.job import ROW_OPS, ChannelLayout, NormJob, NormSpec, PassDirection

from tests.service.backends.cuda.on_gpu import backend, run
from tests.service.memory.host_tensors import DTYPES, host

__all__ = ["backend"]

pytestmark = pytest.mark.gpu

NCHW = ChannelLayout.NCHW
CASES = {
    "rows": (None, (70, 1152), ("scale", "shift", "gate")),
    "rows and a gate": (None, (5, 100), ("gate",)),
    "long rows": (None, (3, 16_000), ("scale", "shift", "gate")),
    "samples": (NCHW, (96, 28, 28), ("scale", "shift", "gate")),
    "samples of few positions": (NCHW, (768, 7, 7), ("scale", "shift")),
    "samples that are read twice": (NCHW, (2500, 6, 6), ("gate",)),
    "samples of the same parameters": (NCHW, (384, 14, 14), ()),
}


def make_tensors(case, direction, dtype, samples):
    """A request's tensors by name, with parameters of another type than x."""
    layout, shape, names = CASES[case]
    size = shape[0] if layout else shape[-1]
    of_x = ["x", *(["dy"] if direction is PassDirection.BACKWARD else [])] + ["residual"] * ("gate" in names)
    tensors = {name: torch.randn(samples, *shape).to(dtype) for name in of_x}
    return tensors | {"weight": torch.randn(size)} | {name: torch.randn(samples, size) for name in names}


def call_library(spec, tensors):
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    forward = spec.direction is PassDirection.FORWARD
    leading = [on_gpu.pop(name) for name in (("x",) if forward else ("dy", "x"))]
    options = {"eps": spec.eps, "activation": spec.activation} | ({"stats": True} if forward else {})
    if spec.layout:
        options["layout"] = spec.layout.value
    function = getattr(fusednorm, f"{spec.op.value}_{spec.direction.value}")
    return function(*leading, **on_gpu, **options)._asdict()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "direction"), [*product(ROW_OPS, PassDirection)])
@pytest.mark.parametrize("case", CASES)
def test_a_job_has_the_bits_of_the_librarys_call(backend, case, op, direction, dtype):
    forward = direction is PassDirection.FORWARD
    spec = NormSpec(op, direction, 1e-5, layout=CASES[case][0], activation="silu", stats=forward)
    requests = [make_tensors(case, direction, dtype, samples) for samples in (1, 3)]
    if forward:
        # Jobs of equal parameters share a launch.
        requests[1]["weight"] = requests[0]["weight"]
    jobs = [NormJob(spec, {name: host(tensor) for name, tensor in each.items()}) for each in requests]
    batch_classes = {job.compute_batch_class() for job in jobs}
    assert len(batch_classes) == 1
    # Sums over rows are computed alone.
    assert (batch_classes == {None}) == (not forward)
    together = run(backend, *jobs) if forward else [run(backend, job)[0] for job in jobs]
    for tensors, got in zip(requests, together, strict=True):
        wanted = {name: each for name, each in call_library(spec, tensors).items() if each is not None}
        if wanted.get("dresidual") is wanted.get("dx"):
            wanted.pop("dresidual", None)
        assert got.keys() == wanted.keys()
        for name, each in wanted.items():
            assert torch.equal(got[name], each.cpu().view(got[name].shape)), name
