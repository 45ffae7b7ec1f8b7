"""The suites of kernels: device time of each provider's pass over a cell, compared with a copy of x."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from benchmarks.harness import records
from benchmarks.harness.compile_ahead import compile_cells
from benchmarks.harness.oracle import ResultOracle
from benchmarks.harness.suite import Note, Row
from benchmarks.harness.timing import DeviceTimer, synchronize
from benchmarks.providers.registry import PROVIDERS, Provider
from benchmarks.providers.torch_provider import make_copy_run
from benchmarks.workload.benchmark_cells import KernelCell
from benchmarks.workload.cell_suites import list_cells
from benchmarks.workload.problems import BenchmarkProblem, TensorCache


class KernelSuite:
    """Cells of several lists; those with the same tensors are neighbours.

    Args:
        names: of lists in `benchmarks.workload.cell_suites.SUITES`.
    """

    providers = tuple(PROVIDERS)
    seconds = float("inf")

    def __init__(self, names: Iterable[str]) -> None:
        self.cells = list_cells(names)

    @cached_property
    def _timer(self) -> DeviceTimer:
        return DeviceTimer()

    @cached_property
    def _tensors(self) -> TensorCache:
        return TensorCache()

    def compile_ahead(self, cells: Sequence[KernelCell], providers: Iterable[str], seconds: float) -> None:
        """Compile in advance, for at most `seconds`."""
        compile_cells(cells, providers, seconds)

    def measure_rows(self, cell: KernelCell, providers: Iterable[str], note: Note) -> Iterator[Row]:
        """The copy's row, and those of every provider that has the cell and computes it correctly."""
        chosen = {name: PROVIDERS[name] for name in providers}
        yield from measure_cell(BenchmarkProblem(cell, self._tensors), chosen, self._timer, note)


def measure_cell(
    problem: BenchmarkProblem, providers: Mapping[str, Provider], timer: DeviceTimer, note: Callable[[str], None]
) -> Iterator[Row]:
    """Rows of the copy and of every provider that has the cell and is correct; `note` receives failures."""
    cell = problem.cell
    oracle = ResultOracle(problem)
    nbytes = 2 * problem.x.nbytes
    copy_time = timer(make_copy_run(problem).call)
    roof = nbytes / copy_time.p50
    yield records.make_row(cell, "copy", copy_time, 0.0, nbytes, roof)
    for name, provider in providers.items():
        try:
            run = provider(problem)
            if run is None:
                continue
            error = oracle.measure_error(run)
            yield records.make_row(
                cell, name, timer(run.call, before=run.restore_inputs), error, problem.min_bytes, roof
            )
        except Exception as error_of_provider:
            note(f"{name}: {cell.name}: {str(error_of_provider)[:300]}")
            synchronize()  # raises, and ends the run, if the device has failed
