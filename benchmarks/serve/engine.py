"""The engine without HTTP, host slab to host slab: `python -m benchmarks.serve.engine --out FILE.csv`.

Many requests of one size in flight, against what copies in both directions at once reach on the same device: on
CUDA between pinned memory and the device, on the CPU from memory to memory.
"""

import argparse
import asyncio
import csv
import time
from collections.abc import Callable
from pathlib import Path

import torch
from normserve.backends.base import Backend
from normserve.backends.choose import choose_backend
from normserve.batcher import Batcher
from normserve.compilation import Compilation
from normserve.engine import Engine
from normserve.executor import Executor
from normserve.jobs import NormJob, NormSpec, Op, Pass
from normserve.metrics import Metrics
from normserve.slabs import SlabPool
from normserve.tensors import DType, HostTensor

from benchmarks.serve import system

COLUMNS = (*system.COLUMNS, "backend", "nbytes", "in_flight", "round", "bytes_per_second", "ceiling", "of_ceiling")
COLS = 4096
_FAR = 1e12


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve.engine")
    parser.add_argument("--out", type=Path, required=True, help="the CSV to write")
    parser.add_argument("--backend", default="auto", help="torch or triton")
    parser.add_argument("--mib", type=int, nargs="+", default=(16, 64, 256), help="sizes of a request")
    parser.add_argument("--in-flight", type=int, default=8, help="requests in flight")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    slabs = SlabPool(max_idle_bytes=2**36)
    rows = asyncio.run(_measured(asked, slabs, choose_backend(asked.backend, 0, slabs)))
    with asked.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


async def _measured(asked: argparse.Namespace, slabs: SlabPool, backend: Backend) -> list[dict[str, object]]:
    batcher = Batcher(max_requests=64, max_bytes=4 * 2**20)
    compilation = Compilation(max_classes=100, max_per_minute=100)
    engine = Engine(Executor(lambda: backend), batcher, compilation, Metrics())
    device = await engine.start()
    engine.open()
    rows: list[dict[str, object]] = []
    for mib in asked.mib:
        nbytes = mib * 2**20
        copies = _pinned_copies(nbytes) if device.kind == "cuda" else _host_copies(nbytes)
        jobs = [_job(slabs, nbytes) for _ in range(asked.in_flight)]
        await _turn(engine, jobs, 0.5)
        for number in range(asked.rounds):
            ceiling = _copied(copies, nbytes, asked.seconds / 2)
            reached = await _turn(engine, jobs, asked.seconds)
            row = system.described() | {
                "backend": backend.name,
                "nbytes": nbytes,
                "in_flight": asked.in_flight,
                "round": number,
                "bytes_per_second": f"{reached:.0f}",
                "ceiling": f"{ceiling:.0f}",
                "of_ceiling": f"{reached / ceiling:.3f}",
            }
            rows.append(row)
            print(
                f"{mib} MiB: {reached / 1e9:.1f} of {ceiling / 1e9:.1f} GB/s, {reached / ceiling:.3f}", flush=True
            )
    engine.stop(10)
    return rows


def _job(slabs: SlabPool, nbytes: int) -> NormJob:
    shape = (nbytes // 2 // COLS, COLS)
    data = slabs.take(nbytes)[:nbytes]
    torch.frombuffer(data, dtype=torch.bfloat16).normal_()
    spec = NormSpec(Op.LAYER_NORM, Pass.FORWARD, eps=1e-5)
    return NormJob(spec, {"x": HostTensor(DType.BFLOAT16, shape, data)})


async def _turn(engine: Engine, jobs: list[NormJob], seconds: float) -> float:
    """Bytes in and out a second, of requests that follow one another on as many lines as there are jobs."""
    end = time.perf_counter() + seconds
    moved = 0

    async def line(job: NormJob) -> None:
        nonlocal moved
        while time.perf_counter() < end:
            again = NormJob(job.spec, job.tensors)
            result = await engine.submit(again, _FAR)
            moved += job.nbytes + sum(tensor.nbytes for tensor in result.tensors.values())

    began = time.perf_counter()
    await asyncio.gather(*(line(job) for job in jobs))
    return moved / (time.perf_counter() - began)


def _copied(copies: Callable[[int], None], nbytes: int, seconds: float) -> float:
    """Bytes a second of both directions together."""
    copies(2)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        copies(8)
        count += 8
    return 2 * nbytes * count / (time.perf_counter() - began)


def _pinned_copies(nbytes: int) -> Callable[[int], None]:
    """So many copies to the device, and beside them as many back."""
    there, back = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    out, home = (torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    going, coming = torch.cuda.Stream(), torch.cuda.Stream()

    def run(count: int) -> None:
        for _ in range(count):
            with torch.cuda.stream(going):
                there.copy_(out, non_blocking=True)
            with torch.cuda.stream(coming):
                home.copy_(back, non_blocking=True)
        going.synchronize()
        coming.synchronize()

    return run


def _host_copies(nbytes: int) -> Callable[[int], None]:
    source, target = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))

    def run(count: int) -> None:
        for _ in range(count):
            target.copy_(source)

    return run


if __name__ == "__main__":
    main()
