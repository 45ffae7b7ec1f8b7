"""An engine on a separate device, and the times of requests in it."""

import asyncio
import time
from dataclasses import dataclass
from statistics import fmean

import torch
from normserve.backends.backend_choice import make_backend_by_name
from normserve.engine.batcher import Batcher
from normserve.engine.compilation_queue import CompilationQueue
from normserve.engine.engine import Engine
from normserve.engine.executor import Executor
from normserve.errors import NormserveError
from normserve.jobs.job import NormJob, NormResult, NormSpec, Op, PassDirection
from normserve.memory.slabs import SlabPool
from normserve.memory.tensors import DType, HostTensor
from normserve.metrics.metrics import Metrics

COLS = 4096
_FAR = 1e12
# Enough for every slab that the results need, and for the kernels.
_WARM_S, _WARM_PASSES = 0.5, 4


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Rates and times of requests in the engine.

    Attributes:
        bytes_per_second: in both directions, of all requests together.
        stages_ms: mean time of a request in each stage; `elsewhere` is the rest.
        host_cores: number of cores that this process kept busy.
    """

    bytes_per_second: float
    stages_ms: dict[str, float]
    host_cores: float


class BareEngine:
    """An engine on a separate device, without a server."""

    def __init__(self, backend: str) -> None:
        self.slabs = SlabPool(max_idle_bytes=2**36)
        # Without a warm-up the only class of requests is compiled at the first one.
        self._executor = Executor(lambda: make_backend_by_name(backend, 0, self.slabs, warm_sizes=()))
        batcher = Batcher(max_requests=64, max_bytes=4 * 2**20)
        compilation = CompilationQueue(max_classes=100, max_per_minute=100)
        self._engine = Engine(self._executor, batcher, compilation, Metrics())

    async def start(self) -> str:
        """Start the device; return its kind."""
        device = await self._engine.start()
        self._engine.accept_jobs()
        return device.kind

    async def make_jobs(self, nbytes: int, count: int) -> list[NormJob]:
        """LayerNorm jobs with `count` inputs in separate slabs; compile kernels and allocate slabs for results."""
        jobs = [_make_job(self.slabs, nbytes) for _ in range(count)]
        await self.run_turn(jobs, _WARM_S, _WARM_PASSES)
        return jobs

    async def run_turn(self, jobs: list[NormJob], seconds: float, passes: int = 1) -> EngineTimes:
        """Submit each job again as soon as it is done, for `seconds` and at least `passes` times."""
        results: list[tuple[float, NormResult]] = []
        moved, began, used = 0, time.perf_counter(), time.process_time()

        async def line(job: NormJob) -> None:
            nonlocal moved
            done = 0
            while done < passes or time.perf_counter() < began + seconds:
                again, asked = NormJob(job.spec, job.tensors), time.perf_counter()
                result = await self._compute(again)
                moved += job.nbytes + sum(tensor.nbytes for tensor in result.tensors.values())
                # Without its tensors, so that their slabs return to the pool for the next one.
                results.append((time.perf_counter() - asked, result._replace(tensors={})))
                del result
                done += 1

        await asyncio.gather(*(line(job) for job in jobs))
        elapsed = time.perf_counter() - began
        return EngineTimes(moved / elapsed, _compute_stages_ms(results), (time.process_time() - used) / elapsed)

    async def _compute(self, job: NormJob) -> NormResult:
        ended: asyncio.Future[NormResult | NormserveError] = asyncio.get_running_loop().create_future()
        self._engine.submit(job, _FAR, ended.set_result)
        result = await ended
        self._engine.release(job)
        if isinstance(result, NormserveError):
            raise result
        return result

    def stop(self) -> None:
        self._engine.stop(10)


def _compute_stages_ms(results: list[tuple[float, NormResult]]) -> dict[str, float]:
    stages = {
        stage: 1000 * fmean(getattr(result, f"{stage}_s") for _, result in results)
        for stage in ("queue", "copy_in", "kernel", "copy_out")
    }
    whole = 1000 * fmean(took for took, _ in results)
    return stages | {"elsewhere": whole - sum(stages.values())}


def _make_job(slabs: SlabPool, nbytes: int) -> NormJob:
    shape = (nbytes // 2 // COLS, COLS)
    data = slabs.borrow(nbytes)[:nbytes]
    torch.frombuffer(data, dtype=torch.bfloat16).normal_()
    spec = NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, eps=1e-5)
    return NormJob(spec, {"x": HostTensor(DType.BFLOAT16, shape, data)})
