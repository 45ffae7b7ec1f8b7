"""Trials of LayerNorm configurations for a tuning cell: its tensors and launches, compiled, checked and timed.

Worker processes import these functions by name, which they could not do from `__main__`.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from fusednorm import ActivationName, traffic
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.execution import run_launches
from fusednorm.launch.launches import Launch
from fusednorm.launch.recorded_launches import bind_to_meta_tensors
from fusednorm.ops.layer_norm.backward.tile import LayerNormBackwardTile
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.checks import view_as_positions
from fusednorm.ops.layer_norm.choices import AnyBackwardConfig, AnyForwardConfig, plan_backward, plan_forward
from fusednorm.results import Backward, Forward
from fusednorm.tensors.arrays import describe_as_array

from benchmarks.harness.timing import DeviceTimer
from benchmarks.workload.benchmark_cells import compute_sweep_rows
from benchmarks.workload.problems import EPS

Config = AnyForwardConfig | AnyBackwardConfig


@dataclass(frozen=True, slots=True)
class LayerNormTuningCell:
    """One pass over rows of one length; x has `rows` rows, by default 256 MiB.

    With `positions`, x is `rows` contiguous samples [cols, positions], and the rows are their positions.
    """

    pass_: str
    cols: int
    dtype: str
    rows: int = 0
    positions: int = 0
    activation: ActivationName = "none"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize


class LayerNormTuningPass:
    """The tensors of a cell, and its launches with a configuration."""

    def __init__(self, cell: LayerNormTuningCell, device: str) -> None:
        rows = cell.rows or compute_sweep_rows(cell.cols * max(1, cell.positions), cell.dtype)
        cols, positions = cell.cols, (cell.positions,) if cell.positions else ()
        options: dict[str, Any] = {"device": device, "dtype": getattr(torch, cell.dtype)}
        fill = torch.empty if device == "meta" else torch.randn
        self._pass, self._is_channels_first = cell.pass_, bool(positions)
        self._options = NormOptions("layer_norm", eps=EPS, activation=cell.activation)
        self.x = fill(rows, cols, *positions, **options)
        weight, bias = (fill(cols, **options) for _ in range(2))
        self._tensors = {"x": self.x, "weight": weight, "bias": bias}
        results = {"y": self.x}
        if cell.pass_ == "backward":
            self._tensors["dy"] = fill(rows, cols, *positions, **options)
            statistics = torch.stack((torch.zeros(rows, *positions), torch.ones(rows, *positions))).to(device)
            self._tensors |= {"mean": statistics[0], "rstd": statistics[1]}
            results = {"dx": self.x, "dweight": weight, "dbias": bias}
        self._tensors |= {name: torch.empty_like(like) for name, like in results.items()}
        self.results = tuple(self._tensors[name] for name in results)

    def plan_launches(self, config: Config | None = None) -> list[Launch]:
        """Launches that write into `results`; with the table's own choice when None."""
        arrays: dict[str, Any] = {name: describe_as_array(name, tensor) for name, tensor in self._tensors.items()}
        if self._is_channels_first:
            for name in {"x", "y", "dy", "dx"} & arrays.keys():
                arrays[name] = view_as_positions(arrays[name])
        if self._pass == "forward":
            assert config is None or isinstance(config, AnyForwardConfig)
            out = Forward(arrays.pop("y"))
            return plan_forward(LayerNormForwardCall(**arrays, options=self._options, out=out), config)
        assert config is None or isinstance(config, AnyBackwardConfig)
        gradients = Backward(arrays.pop("dx"), arrays.pop("dweight"), arrays.pop("dbias"))
        return plan_backward(LayerNormBackwardCall(**arrays, options=self._options, out=gradients), config)

    def run_launches(self, plan: Iterable[Launch]) -> None:
        """Execute the launches of a plan."""
        run_launches(self.x.device, plan, self._tensors)

    @property
    def min_bytes(self) -> int:
        """The minimum number of bytes that the pass must move."""
        fewest = traffic.compute_forward_bytes if self._pass == "forward" else traffic.compute_backward_bytes
        return fewest(self.x.numel(), self.x.element_size(), self.x.element_size())


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
        step.kernel.warmup(
            *bind_to_meta_tensors(step.arguments), grid=step.grid, enable_fp_fusion=True, **step.options
        )


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
