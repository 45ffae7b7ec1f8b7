"""The CUDA backend on a real GPU, and jobs run by it."""

import pytest
import torch
from normserve.jobs.job import Batch, Layout, NormJob, NormSpec, Op, Pass
from normserve.memory.slabs import SlabPool

from tests.service.memory.host_tensors import back, host


@pytest.fixture(scope="module")
def backend():
    from normserve.backends.cuda.backend import TritonBackend

    made = TritonBackend(SlabPool(max_idle_bytes=2**26))
    device = made.start()
    assert device.kind == "cuda"
    assert device.copy_bandwidth > 1e11
    return made


def run(backend, *jobs: NormJob) -> list[dict[str, torch.Tensor]]:
    """The jobs' results, of one launch."""
    execution = backend.run(Batch(jobs)).wait()
    assert execution.kernel_s > 0
    return [{name: back(tensor) for name, tensor in outputs.items()} for outputs in execution.outputs]


def in_and_out(op: Op, direction: Pass, layout: Layout, dtype: torch.dtype) -> list[NormJob]:
    """Jobs of one and of three rows or samples, small enough to be computed in place."""
    forward, grouped = direction is Pass.FORWARD, op is Op.GROUP_NORM
    jobs = []
    parameters = {} if grouped or not forward else {"weight": torch.randn(640)}
    for count in (1, 3):
        shape = (count, 640) if not grouped else (count, 7, 5, 64) if layout is Layout.NHWC else (count, 64, 7, 5)
        names = ("x", "residual") if forward else ("x", "dy", "dresidual_out")
        tensors = {name: torch.randn(shape).to(dtype) for name in names} | parameters
        if grouped:
            tensors |= {"scale": torch.randn(count, 64), "shift": torch.randn(count, 64).to(dtype)}
        spec = NormSpec(op, direction, 1e-5, 8 if grouped else 0, layout, "silu", stats=forward)
        jobs.append(NormJob(spec, {name: host(tensor) for name, tensor in tensors.items()}))
    return jobs
