"""The suite `models`: milliseconds of a training step and of a forward pass, for torch, fusednorm and Liger.

All providers have the same weights and inputs.  Before anything is timed, the loss and the norm of the gradients
of each provider are compared with torch's; a provider that differs by more than rounding explains has rows without
times.  `max_error` is the larger relative difference of the two.

Times are wall times of passes, each with a synchronisation at its end.  Providers take turns, except with graphs,
because each graph keeps its pass's memory.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from fusednorm.launch import replay_cache

from benchmarks.harness import records
from benchmarks.harness.compile_ahead import fix_triton_cache, limit_inductor
from benchmarks.harness.suite import Note, Row
from benchmarks.harness.timing import TimeQuantiles, compute_quantiles, disable_garbage_collection, synchronize
from benchmarks.harness.worker_pool import count_workers, run_in_workers
from benchmarks.models.architectures import ARCHITECTURES
from benchmarks.models.cells import CELLS, ModelCell
from benchmarks.models.model_passes import ModelPasses, StepOutcome
from benchmarks.models.norm_providers import PROVIDERS, NothingReplacedError

CALLS = 3
"""Timed calls of a provider per round; every provider has a turn in each round, so that drift affects all."""

ROUNDS = 8
"""Minimum number of rounds."""

MOST_ROUNDS = 40
"""Maximum, for passes so short that other work of the host affects them."""

SECONDS = 1.5
"""Time of the timed calls of each provider, unless `MOST_ROUNDS` are reached before."""

_WARMUP = 3

REFERENCE = "torch"

TOLERANCE = StepOutcome(loss=0.01, gradient_norm=0.05)
"""Relative differences that rounding to bfloat16 through a whole model explains."""

COMPILED = ("torch", "fusednorm")
"""Providers whose models are compiled."""

_MOST_COMPILERS = 6
"""Maximum number of models compiled in parallel: each is in the device's memory."""

_SHARE_OF_COMPILING = 0.3
"""Fraction of the available time."""


class ModelSuite:
    """Times every cell once, with its providers in turn.

    Args:
        device: of the models.
    """

    providers = tuple(PROVIDERS)
    seconds = 600.0
    cells: Sequence[ModelCell] = CELLS

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._noted = False
        self._pending_compilation: Callable[[], object] | None = None

    def compile_ahead(self, cells: Sequence[ModelCell], providers: Iterable[str], seconds: float) -> None:
        """Keep the cells and the time, to compile in parallel once the first cell needs torch.compile."""
        compiled = [cell for cell in cells if "compile" in cell.variants]
        work = [(cell, name) for cell in compiled for name in providers if name in COMPILED]
        workers = min(_MOST_COMPILERS, count_workers())
        self._pending_compilation = lambda: run_in_workers(
            compile_once, work, workers, seconds * _SHARE_OF_COMPILING
        )

    def measure_rows(self, cell: ModelCell, providers: Iterable[str], note: Note) -> Iterator[Row]:
        """Rows of every provider that can be timed; `note` receives failures."""
        if "compile" in cell.variants:
            fix_triton_cache()
            torch.compiler.reset()
            if self._pending_compilation is not None:
                _free_memory()
                self._pending_compilation()
                self._pending_compilation = None
        try:
            yield from self._measure_cell(cell, providers, note)
        except Exception as error:
            note(f"{cell.name}: {_format_error(error)}")
        finally:
            _free_memory()

    def _measure_cell(self, cell: ModelCell, providers: Iterable[str], note: Note) -> Iterator[Row]:
        made: dict[str, ModelPasses] = {}
        errors: dict[str, float] = {}
        of_torch = self._make_passes(cell, REFERENCE)
        reference = of_torch.run_step()
        for name in providers:
            if cell.variants == ("compile",) and name not in COMPILED:
                continue
            _free_memory()  # Memory of an earlier one that failed.
            try:
                passes = of_torch if name == REFERENCE else self._make_passes(cell, name)
                if "compile" in cell.variants:
                    passes.compile()
                outcome = passes.run_step()
                self._report_missing_extension(name, note)
            except NothingReplacedError as error:
                note(f"{name}: {cell.name}: {error}")
                continue
            except Exception as error:
                note(f"{name}: {cell.name}: {_format_error(error)}")
                continue
            errors[name] = outcome.compute_error(reference)
            if is_within_tolerance(outcome, reference):
                made[name] = passes
            else:
                note(f"{name}: {cell.name}: {outcome} is not torch's {reference}")
                yield from _make_wrong_rows(cell, name, errors[name])
        for variant in cell.variants:
            for pass_ in cell.passes:
                times: Mapping[str, TimeQuantiles | None]
                if variant == "graph":
                    times = _time_graphs(made, pass_, reference, cell, note)
                else:
                    times = _time_passes(made, pass_, cell, note)
                for name, time_ms in times.items():
                    yield records.make_row(cell.make_row(pass_, variant), name, time_ms, errors[name])

    def _report_missing_extension(self, provider: str, note: Note) -> None:
        """Note once if ours is timed without the host extension."""
        if provider == records.OURS and replay_cache.get_extension() is None and not self._noted:
            note("fusednorm is timed without its host extension: python -m fusednorm.host compiles it")
            self._noted = True

    def _make_passes(self, cell: ModelCell, provider: str) -> ModelPasses:
        return make_passes(cell, provider, self._device)


def make_passes(cell: ModelCell, provider: str, device: str) -> ModelPasses:
    """The passes of a cell's model with a provider's norms; weights and inputs are always the same."""
    architecture = ARCHITECTURES[cell.architecture]
    model = architecture.make_model(cell.shape, device)
    PROVIDERS[provider](model)
    torch.manual_seed(1)
    return ModelPasses(model, architecture, architecture.forward_inputs(cell.shape, device))


def is_within_tolerance(outcome: StepOutcome, reference: StepOutcome) -> bool:
    """Whether rounding explains the difference."""
    return all(
        abs(a - b) <= tolerance * abs(b) for a, b, tolerance in zip(outcome, reference, TOLERANCE, strict=True)
    )


def _make_wrong_rows(cell: ModelCell, provider: str, error: float) -> Iterator[Row]:
    for variant in cell.variants:
        for pass_ in cell.passes:
            yield records.make_row(cell.make_row(pass_, variant), provider, None, error)


def _time_passes(made: dict[str, ModelPasses], pass_: str, cell: ModelCell, note: Note) -> dict[str, TimeQuantiles]:
    """Times of the providers whose pass runs, in turn."""
    calls = {}
    for name, passes in made.items():
        try:
            passes.get_call(pass_)()
            synchronize()
        except Exception as error:
            note(f"{name}: {cell.name}: {pass_}: {_format_error(error)}")
        else:
            calls[name] = passes.get_call(pass_)
    times = time_in_turns(calls)
    for passes in made.values():
        passes.clear_gradients()
    return times


def _time_graphs(
    made: dict[str, ModelPasses], pass_: str, reference: StepOutcome, cell: ModelCell, note: Note
) -> dict[str, TimeQuantiles | None]:
    """Times of graphs, one after the other because each keeps its pass's memory; None if one is wrong."""
    times: dict[str, TimeQuantiles | None] = {}
    for name, passes in made.items():
        try:
            times[name] = _time_graph(passes, pass_, reference)
        except Exception as error:
            note(f"{name}: {cell.name}: graph of {pass_}: {_format_error(error)}")
        else:
            if times[name] is None:
                note(f"{name}: {cell.name}: graph of {pass_}: other results than torch's")
        passes.clear_gradients()
        _free_memory()
    return times


def _time_graph(passes: ModelPasses, pass_: str, reference: StepOutcome) -> TimeQuantiles | None:
    """Times of replays, or None if their result differs."""
    graph = passes.capture_graph(pass_)
    if pass_ == "step" and not is_within_tolerance(passes.replay_step(graph), reference):
        return None
    return time_in_turns({pass_: graph.replay})[pass_]


def time_in_turns(calls: Mapping[str, Callable[[], object]]) -> dict[str, TimeQuantiles]:
    """Quantiles of each one's calls, in milliseconds, after a few warm-up calls."""
    for call in calls.values():
        for _ in range(_WARMUP):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with disable_garbage_collection():
        for done in range(MOST_ROUNDS):
            if done >= ROUNDS and all(sum(of_call) >= SECONDS * 1e3 for of_call in samples.values()):
                break
            for name, call in calls.items():
                samples[name] += (_measure_wall_ms(call) for _ in range(CALLS))
    return {name: compute_quantiles(of_call) for name, of_call in samples.items()}


def _measure_wall_ms(call: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter_ns()
    call()
    synchronize()
    return (time.perf_counter_ns() - began) / 1e6


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _free_memory() -> None:
    """Free the device's memory; a permanent device error is raised here and ends the run."""
    synchronize()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compile_once(item: tuple[ModelCell, str]) -> None:
    """Compile one provider's model and run what the cell times, which fills the caches on disk."""
    limit_inductor()
    cell, provider = item
    torch.compiler.reset()
    passes = make_passes(cell, provider, "cuda" if torch.cuda.is_available() else "cpu")
    passes.compile()
    for pass_ in cell.passes:
        passes.get_call(pass_)()
    del passes
    _free_memory()
