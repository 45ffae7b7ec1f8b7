"""Compiles the kernels of a benchmark in advance and in parallel, into the caches on disk.

The keys of Inductor's, Triton's and QuACK's caches include shapes, so each item is run once as it will be timed.
Inductor also chooses among configurations by timing them, and stores the choice.  With other workers running these
times are noise, so nothing is stored here, and the benchmark itself chooses again, alone.  Helion's examples, which
store their choice, are left to the benchmark.
"""

import os
import sys
import time
from collections.abc import Iterable

import torch
import triton
from fusednorm.host.background_build import ensure_extension_built, is_build_enabled

from benchmarks.harness.worker_pool import count_workers, run_in_workers
from benchmarks.providers.registry import PROVIDERS
from benchmarks.workload.benchmark_cells import KernelCell
from benchmarks.workload.problems import BenchmarkProblem, TensorCache

_NOT_COMPILED_AHEAD = ("torch", "liger_cute", "helion")
"""Providers that compile nothing, or nothing that another process finds, or only what they time."""


def fix_triton_cache() -> None:
    """Keep Triton's cache in its folder: Inductor moves it at its first use, unless the folder has been set."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(triton.knobs.cache.dir))


def wait_for_extension() -> None:
    """Compile the host extension, or wait for the process that does, before calls are timed on a GPU.

    With the build switched off no compiler starts later, either, and kernels are timed without the extension.
    """
    if torch.cuda.is_available() and is_build_enabled():
        try:
            ensure_extension_built()
        except (OSError, RuntimeError) as error:
            print(f"there is no host extension: {error}", file=sys.stderr)


def limit_inductor() -> None:
    """Make Inductor compile in this process only, and store no choice of configurations."""
    from torch._inductor import config

    config.compile_threads = 1
    config.autotune_local_cache = False


def compile_cells(cells: Iterable[KernelCell], providers: Iterable[str], seconds: float) -> None:
    """Run every provider of every cell once, on most cores in parallel, for at most `seconds`."""
    fix_triton_cache()
    work = [(cell, provider) for cell in cells for provider in providers if provider not in _NOT_COMPILED_AHEAD]
    began = time.monotonic()
    taken = run_in_workers(run_provider_once, work, count_workers(), seconds)
    took = time.monotonic() - began
    print(f"compiling ahead: {taken} of {len(work)} begun, failures above, {took:.0f} s", file=sys.stderr)


def run_provider_once(item: tuple[KernelCell, str]) -> None:
    """Run one provider of one cell, which compiles what it needs."""
    limit_inductor()
    cell, provider = item
    run = PROVIDERS[provider](BenchmarkProblem(cell, TensorCache()))
    if run is not None:
        run.call()
        torch.cuda.synchronize()
        del run
    torch.cuda.empty_cache()
