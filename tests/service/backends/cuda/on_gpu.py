"""The CUDA backend on a real GPU, and jobs run by it."""

import pytest
import torch
from normserve.jobs.job import Batch, NormJob
from normserve.memory.slabs import SlabPool

from tests.service.memory.host_tensors import back


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
    return [{name: back(tensor) for name, tensor in outputs.items()} for outputs in execution.results]
