"""The engine without HTTP, host slab to host slab: `python -m benchmarks.serve.engine --out FILE.csv`.

Many requests of one size in flight, compared with simultaneous copies in both directions on the same device: on
CUDA between pinned memory and the device, on the CPU from memory to memory.  A row has a request's time in each
stage; `elsewhere` is the rest, for example waits for the device's streams.  With `host_cores` near one and short
stages, the GIL is the limit.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.harness.csv_results import CsvResults, add_output_options
from benchmarks.serve.engine.bare_engine import BareEngine, EngineTimes

COLUMNS = (
    *("backend", "nbytes", "in_flight", "round", "bytes_per_second", "ceiling", "of_ceiling"),
    *("queue_ms", "copy_in_ms", "kernel_ms", "copy_out_ms", "elsewhere_ms", "host_cores"),
)


def main() -> int:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    parser.add_argument("--backend", default="auto", help="torch or triton")
    parser.add_argument("--mib", type=int, nargs="+", default=(16, 64, 256), help="sizes of a request")
    parser.add_argument("--in-flight", type=int, nargs="+", default=(8,), help="requests in flight")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    results = CsvResults(asked.out, COLUMNS, asked.commit)
    asyncio.run(_measure_engine(results, asked))
    return results.exit_code


async def _measure_engine(results: CsvResults, asked: argparse.Namespace) -> None:
    engine = BareEngine(asked.backend)
    kind = await engine.start()
    for mib in asked.mib:
        for in_flight in asked.in_flight:
            with results.run_part(f"{mib} MiB, {in_flight} in flight"):
                nbytes = mib * 2**20
                copies = _make_pinned_copies(nbytes) if kind == "cuda" else _make_host_copies(nbytes)
                jobs = await engine.make_jobs(nbytes, in_flight)
                for number in range(asked.rounds):
                    ceiling = _measure_copy_rate(copies, nbytes, asked.seconds / 2)
                    passage = await engine.run_turn(jobs, asked.seconds)
                    row = {"backend": kind, "nbytes": nbytes, "in_flight": in_flight, "round": number}
                    results.add_row(row | _make_figures(passage, ceiling))
                    print(f"{mib} MiB, {in_flight} in flight: {_format_figures(passage, ceiling)}", flush=True)
                del jobs, copies
    engine.stop()


def _make_figures(passage: EngineTimes, ceiling: float) -> dict[str, object]:
    return {
        "bytes_per_second": f"{passage.bytes_per_second:.0f}",
        "ceiling": f"{ceiling:.0f}",
        "of_ceiling": f"{passage.bytes_per_second / ceiling:.3f}",
        **{f"{stage}_ms": f"{ms:.4f}" for stage, ms in passage.stages_ms.items()},
        "host_cores": f"{passage.host_cores:.2f}",
    }


def _format_figures(passage: EngineTimes, ceiling: float) -> str:
    stages = ", ".join(f"{stage} {ms:.3f}" for stage, ms in passage.stages_ms.items())
    return (
        f"{passage.bytes_per_second / 1e9:.1f} of {ceiling / 1e9:.1f} GB/s, "
        f"{passage.bytes_per_second / ceiling:.3f}; ms: {stages}; {passage.host_cores:.2f} cores"
    )


def _measure_copy_rate(copies: Callable[[int], None], nbytes: int, seconds: float) -> float:
    """Bytes per second of both directions together."""
    copies(2)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        copies(8)
        count += 8
    return 2 * nbytes * count / (time.perf_counter() - began)


def _make_pinned_copies(nbytes: int) -> Callable[[int], None]:
    """A function that makes n copies to the device and, at the same time, n copies back."""
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


def _make_host_copies(nbytes: int) -> Callable[[int], None]:
    source, target = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))

    def run(count: int) -> None:
        for _ in range(count):
            target.copy_(source)

    return run


if __name__ == "__main__":
    sys.exit(main())
