"""A cell's configurations, compiled and timed; workers import these by name, as they cannot from `__main__`."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import torch
from fusednorm.launch.recorded_launches import bind_to_nothing
from fusednorm.ops.layer_norm.backward.tile import LayerNormBackwardTile

from benchmarks.harness.timing import DeviceTimer
from benchmarks.tune.layer_norm.passes import Config, LayerNormTuningCell, LayerNormTuningPass


class TimedRowConfig(NamedTuple):
    """A configuration, the median of its times in milliseconds, and the fraction of a copy that it reaches."""

    ms: float
    of_copy: float
    config: Config

    @property
    def name(self) -> str:
        """LayerNormForwardSweep(4096, 8, 0)."""
        return type(self.config).__name__ + str(tuple(asdict(self.config).values()))


def compile_config(item: tuple[LayerNormTuningCell, Config]) -> None:
    """Fill Triton's cache, in a worker process."""
    cell, config = item
    for step in LayerNormTuningPass(cell, "meta").plan_launches(config):
        step.kernel.warmup(*bind_to_nothing(step.arguments), grid=step.grid, enable_fp_fusion=True, **step.options)


def select_distinct_kernels(
    work: Iterable[tuple[LayerNormTuningCell, Config]],
) -> list[tuple[LayerNormTuningCell, Config]]:
    """One item for each set of kernels: tiles that differ only in the number of programs share kernels."""
    shared = (
        (cell, replace(config, programs_per_sm=1) if isinstance(config, LayerNormBackwardTile) else config)
        for cell, config in work
    )
    return list(dict.fromkeys(shared))


def time_cell(
    cell: LayerNormTuningCell, configs: Iterable[Config], timer: DeviceTimer, device: str = "cuda"
) -> list[TimedRowConfig]:
    """Every configuration that agrees with the table's choice, fastest first; the others are printed on stderr."""
    of = LayerNormTuningPass(cell, device)
    roof = 2 * of.x.nbytes / timer(lambda: of.results[0].copy_(of.x)).p50
    of.run_launches(of.plan_launches())
    expected = tuple(result.clone() for result in of.results)
    rows = []
    for config in configs:
        try:
            plan = of.plan_launches(config)
            for result in of.results:
                result.fill_(float("nan"))
            of.run_launches(plan)
            _check_results(of.results, expected)
            ms = timer(partial(of.run_launches, plan), repeats=20, warmup=2).p50
        except Exception as error:
            print(f"{cell} {config}: {str(error)[:120]}", file=sys.stderr)
            continue
        rows.append(TimedRowConfig(ms, of.min_bytes / ms / roof, config))
    return sorted(rows, key=lambda row: row.ms)


def _check_results(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for index, (actual, right) in enumerate(zip(results, expected, strict=True)):
        if not torch.allclose(actual, right, rtol=2e-2, atol=float(right.abs().max()) * 1e-2):
            raise ValueError(f"result {index} is wrong")
