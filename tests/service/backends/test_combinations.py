"""Whatever is optional may come or stay away with anything else: both backends against the oracle in float64."""

import fusednorm
import pytest
import torch
from normserve.backends.cpu.backend import CpuBackend
from normserve.backends.cuda import backend as triton
from normserve.jobs.job import Batch, Op, QueueLane
from normserve.memory.slabs import SlabPool

from tests.service.backends.combinations import KINDS, MOST_COMBINATIONS, answer, assert_all_right, combinations
from tests.service.backends.cuda.test_host import HostStreams
from tests.service.backends.fake_graphs import FakeGraphs

# One of so many combinations is interpreted, which takes a hundred times as long.
_INTERPRETED_OF = 97
# On a GPU in so many parts, since with a cold cache nearly each combination compiles kernels of its own.
_PARTS = 8


def name_of(value: object) -> str:
    return str(getattr(value, "value", value)).removeprefix("torch.")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


@pytest.fixture(autouse=True)
def alone():
    """Threads that wait for one another take a hundred times as long as tensors of so few elements."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(run, kind, chosen=range(MOST_COMBINATIONS)) -> int:
    """Args: chosen: which combinations, by number."""
    return assert_all_right((each, answer(run, each)) for each in combinations(*kind, chosen))


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(name_of, kind)))
def test_on_the_cpu(kind, every):
    backend = CpuBackend(1)
    parameters = 1 if kind[0] is Op.RMS_NORM else 2
    # Each parameter, scale, shift, and two more choices; of the sum there are three with a gate.
    count = 2 ** (parameters + 4) * (2 if kind[0] is Op.GROUP_NORM else 3)
    # Others of each kind.
    chosen = range(KINDS.index(kind) % every, count, every)
    assert check(lambda job: backend.run(Batch((job,))), kind, chosen) == len(chosen)
    assert not [*combinations(*kind, range(count, MOST_COMBINATIONS))]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to run all of them on")
def test_some_interpreted(monkeypatch):
    monkeypatch.setattr(triton, "_DEVICE", "cpu")
    monkeypatch.setattr(triton, "CudaStreams", HostStreams)
    monkeypatch.setattr(triton, "CudaGraphCapturer", FakeGraphs)
    backend = triton.TritonBackend(SlabPool(max_idle_bytes=0))
    backend._pipelines = {lane: triton.StreamPipeline(HostStreams(urgent=False)) for lane in QueueLane}
    assert triton.fusednorm is fusednorm
    count = 0
    for index, kind in enumerate(KINDS):
        # Others of each kind.
        chosen = range(-7 * index % _INTERPRETED_OF, MOST_COMBINATIONS, _INTERPRETED_OF)
        count += check(lambda job: backend.run(Batch((job,))).wait(), kind, chosen)
    assert count >= len(KINDS) // 2


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(name_of, kind)))
def test_on_a_gpu(kind, part, gpu_backend):
    assert check(lambda job: gpu_backend.run(Batch((job,))).wait(), kind, range(part, MOST_COMBINATIONS, _PARTS))


@pytest.fixture(scope="module")
def gpu_backend():
    made = triton.TritonBackend(SlabPool(max_idle_bytes=2**26))
    made.start()
    return made
