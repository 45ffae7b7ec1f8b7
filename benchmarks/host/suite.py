"""The suite `host`: for each provider the host time of a call and the wall time of a loop of calls.

Variants are `queued`, 300 calls while the device has other work, and `loop`, 300 calls and one synchronisation;
`queued_silu` and `loop_silu` with SiLU.  Results and gradients are checked before calls are timed.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from benchmarks.harness import records
from benchmarks.harness.oracle import Oracle
from benchmarks.harness.suite import Note, Row
from benchmarks.harness.timing import synchronize
from benchmarks.harness.workers import run_in_workers
from benchmarks.host.calls import PROVIDERS, HostCall, NoExtensionError, call_of, settings
from benchmarks.host.cells import CELLS, FORWARD_BACKWARD
from benchmarks.host.timing import WAYS, Cuda, Device
from benchmarks.workload.cells import Cell
from benchmarks.workload.problem import Problem, Run, Tensors

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
    cells: Sequence[Cell] = CELLS

    def __init__(self, device: Callable[[], Device] = Cuda, tensors: Callable[[], Tensors] = Tensors) -> None:
        self._device, self._tensors = device, tensors()
        self._ready: Device | None = None

    def warm(self, cells: Sequence[Cell], providers: Iterable[str], seconds: float) -> None:
        """Compile in advance, on most cores in parallel, for at most a part of `seconds`."""
        work = [(cell, provider) for cell in cells for provider in providers if provider in ("fusednorm", "liger")]
        run_in_workers(run_once, work, max(1, (os.cpu_count() or 2) - 2), seconds * _SHARE_OF_COMPILING)

    def rows(self, cell: Cell, providers: Iterable[str], note: Note) -> Iterator[Row]:
        """Rows of every provider that has the cell and computes it correctly; `note` receives failures."""
        if self._ready is None:
            self._ready = self._device()
        problem = Problem(cell, self._tensors)
        oracle = Oracle(Problem(_checked_cell(cell), self._tensors))
        for provider in providers:
            try:
                with settings(provider):
                    yield from self._timed(provider, problem, oracle, self._ready)
            except Exception as error:
                note(f"{provider}: {cell.name}: {str(error)[:300]}")
                synchronize()  # raises, and ends the run, if the device has failed

    def _timed(self, provider: str, problem: Problem, oracle: Oracle, device: Device) -> Iterator[Row]:
        made = call_of(provider, problem)
        if made is None:
            return
        error = oracle.error(Run(lambda: _results(made)))
        for _ in range(_WARMUP):
            made.call()
        cell = problem.cell
        silu = "" if cell.variant == "plain" else f"_{cell.variant}"
        for way, timed in WAYS.items():
            yield records.row(replace(cell, variant=way + silu), provider, timed(made.call, device), error)


def _checked_cell(cell: Cell) -> Cell:
    """The cell whose exact results are the call's: for a module, gradients are enough to check its forward pass."""
    return replace(cell, pass_="backward") if cell.pass_ == FORWARD_BACKWARD else cell


def _results(made: HostCall) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.detach() for tensor in made.results(made.call()))


def run_once(item: tuple[Cell, str]) -> None:
    """Make one provider's call, which compiles what it needs."""
    cell, provider = item
    with suppress(NoExtensionError), settings("fusednorm_python" if provider == "fusednorm" else provider):
        made = call_of(provider, Problem(cell, Tensors()))
        if made is not None:
            made.call()
            synchronize()
