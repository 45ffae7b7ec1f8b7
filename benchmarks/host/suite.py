"""The suite `host`: for each provider the host time of a call and the wall time of a loop of calls.

Variants are `queued`, 300 calls while the device has other work, 50 at a time, and `loop`, 300 calls and one
synchronisation; `queued_silu` and `loop_silu` with SiLU.  Results and gradients are checked before calls are timed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from benchmarks.harness import records
from benchmarks.harness.oracle import ResultOracle
from benchmarks.harness.suite import Note, Row
from benchmarks.harness.timing import synchronize
from benchmarks.harness.worker_pool import count_workers, run_in_workers
from benchmarks.host.calls import PROVIDERS, HostCall, MissingExtensionError, make_call, select_settings
from benchmarks.host.cells import CELLS, FORWARD_BACKWARD
from benchmarks.host.timing import WAYS, BusyDevice, CudaDevice
from benchmarks.workload.benchmark_cells import KernelCell
from benchmarks.workload.problems import BenchmarkProblem, ProviderRun, TensorCache

_WARMUP = 5

_SHARE_OF_COMPILING = 0.5
"""Fraction of the available time."""


class HostSuite:
    """Times every cell once, with each provider in both ways.

    Args:
        device, tensors: the device to time and the tensors' device; by default the current CUDA device.
    """

    providers = PROVIDERS
    seconds = 180.0
    cells: Sequence[KernelCell] = CELLS

    def __init__(
        self, device: Callable[[], BusyDevice] = CudaDevice, tensors: Callable[[], TensorCache] = TensorCache
    ) -> None:
        self._device, self._tensors = device, tensors()
        self._ready: BusyDevice | None = None

    def compile_ahead(self, cells: Sequence[KernelCell], providers: Iterable[str], seconds: float) -> None:
        """Compile in advance, on most cores in parallel, for at most a part of `seconds`."""
        work = [(cell, provider) for cell in cells for provider in providers if provider in ("fusednorm", "liger")]
        run_in_workers(make_call_once, work, count_workers(), seconds * _SHARE_OF_COMPILING)

    def measure_rows(self, cell: KernelCell, providers: Iterable[str], note: Note) -> Iterator[Row]:
        """Rows of every provider that has the cell and computes it correctly; `note` receives failures."""
        if self._ready is None:
            self._ready = self._device()
        problem = BenchmarkProblem(cell, self._tensors)
        oracle = ResultOracle(BenchmarkProblem(_make_checked_cell(cell), self._tensors))
        for provider in providers:
            try:
                with select_settings(provider):
                    yield from self._time_provider(provider, problem, oracle, self._ready)
            except Exception as error:
                note(f"{provider}: {cell.name}: {str(error)[:300]}")
                synchronize()  # raises, and ends the run, if the device has failed

    def _time_provider(
        self, provider: str, problem: BenchmarkProblem, oracle: ResultOracle, device: BusyDevice
    ) -> Iterator[Row]:
        made = make_call(provider, problem)
        if made is None:
            return
        error = oracle.measure_error(ProviderRun(lambda: _compute_results(made)))
        for _ in range(_WARMUP):
            made.call()
        cell = problem.cell
        silu = "" if cell.variant == "plain" else f"_{cell.variant}"
        for way, timed in WAYS.items():
            yield records.make_row(replace(cell, variant=way + silu), provider, timed(made.call, device), error)


def _make_checked_cell(cell: KernelCell) -> KernelCell:
    """The cell whose exact results are the call's: for a module, gradients are enough to check its forward pass."""
    return replace(cell, pass_="backward") if cell.pass_ == FORWARD_BACKWARD else cell


def _compute_results(made: HostCall) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.detach() for tensor in made.select_results(made.call()))


def make_call_once(item: tuple[KernelCell, str]) -> None:
    """Make one provider's call, which compiles what it needs."""
    cell, provider = item
    with (
        suppress(MissingExtensionError),
        select_settings("fusednorm_python" if provider == "fusednorm" else provider),
    ):
        made = make_call(provider, BenchmarkProblem(cell, TensorCache()))
        if made is not None:
            made.call()
            synchronize()
