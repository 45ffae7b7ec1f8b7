"""Trials of GroupNorm configurations for a tuning cell: its tensors and launches, compiled, checked and timed.

Worker processes import these functions by name, which they could not do from `__main__`.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import traffic
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.execution import run_launches
from fusednorm.launch.launches import Launch
from fusednorm.launch.recorded_launches import bind_to_meta_tensors
from fusednorm.ops.group_norm.affine_step import AffineParameters
from fusednorm.ops.group_norm.backward_choice import plan_backward
from fusednorm.ops.group_norm.call import (
    GroupNormBackwardCall,
    GroupNormBackwardConfig,
    GroupNormForwardCall,
    GroupNormForwardConfig,
)
from fusednorm.ops.group_norm.forward_choice import plan_forward
from fusednorm.ops.group_norm.sample_shape import SampleShape
from fusednorm.results import Backward, Forward
from fusednorm.tensors.arrays import describe_as_array
from torch import Tensor

from benchmarks.harness.csv_results import CsvResults
from benchmarks.harness.timing import DeviceTimer
from benchmarks.harness.worker_pool import count_workers, run_in_workers
from benchmarks.tune.group_norm import backward_candidates, forward_candidates
from benchmarks.workload.problems import EPS

Config = GroupNormForwardConfig | GroupNormBackwardConfig

CANDIDATES: dict[str, Callable[[SampleShape, int, int], Iterator[Config]]] = {
    "forward": forward_candidates.iterate_candidates,
    "backward": backward_candidates.iterate_candidates,
}
GROUPS = 32
ACTIVATION = "silu"

COLUMNS = ("pass", "shape", "layout", "dtype", "config", "ms", "of_copy", "error")

SHOWN = 5
"""Number of a cell's fastest configurations in the printed line."""


def format_config(config: Config) -> str:
    """ForwardResident(8,3,1,0)."""
    assert is_dataclass(config)
    return f"{type(config).__name__}({','.join(map(str, asdict(config).values()))})"


@dataclass(frozen=True, slots=True)
class GroupNormTuningCell:
    """One pass over one tensor; `shape` is x's, whatever the layout."""

    pass_: str
    shape: tuple[int, ...]
    layout: str
    dtype: str

    @property
    def sample(self) -> SampleShape:
        channels = self.shape[1] // GROUPS
        return SampleShape(GROUPS, channels, math.prod(self.shape[2:]), self.layout == "nhwc")

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def name(self) -> str:
        """forward bfloat16 8x512x64x64 nchw."""
        return f"{self.pass_} {self.dtype} {'x'.join(map(str, self.shape))} {self.layout}"

    def iterate_configs(self, only: str = "") -> Iterator[Config]:
        """The cell's candidates whose repr matches."""
        for config in CANDIDATES[self.pass_](self.sample, self.torch_dtype.itemsize, self.shape[0]):
            if re.search(only, repr(config)):
                yield config


class GroupNormTuningPass:
    """The tensors of a cell, and its launches with a configuration."""

    def __init__(self, cell: GroupNormTuningCell, device: str) -> None:
        self.cell = cell
        fill = torch.empty if device == "meta" else torch.randn
        options: dict[str, Any] = {"device": device, "dtype": cell.torch_dtype}
        n, c, *spatial = cell.shape

        def make_tensor() -> Tensor:
            if cell.layout == "nchw":
                return fill(cell.shape, **options)
            axes = (0, 1 + len(spatial), *range(1, 1 + len(spatial)))
            return fill((n, *spatial, c), **options).permute(axes)

        self.x, self.dy = make_tensor(), make_tensor() if cell.pass_ == "backward" else None
        self.weight, self.bias = (fill(c, **options) for _ in range(2))
        self.mean, self.rstd = (torch.empty((n, GROUPS), device=device, dtype=torch.float32) for _ in range(2))
        if device != "meta":
            h = self.x.float().reshape(n, GROUPS, -1)
            variance, mean = torch.var_mean(h, dim=-1, correction=0)
            self.mean.copy_(mean)
            self.rstd.copy_((variance + EPS).rsqrt())
        self.tensors = {"x": self.x, "weight": self.weight, "bias": self.bias, "mean": self.mean, "rstd": self.rstd}
        results = {"y": self.x}
        if self.dy is not None:
            self.tensors["dy"] = self.dy
            results = {"dx": self.x, "dweight": self.weight, "dbias": self.bias}
        self.tensors |= {name: torch.empty_like(like) for name, like in results.items()}
        self.results = tuple(self.tensors[name] for name in results)

    def plan_launches(self, config: Config) -> list[Launch]:
        """Launches that write into `results`."""
        options = NormOptions("group_norm", self.cell.sample.groups, EPS, activation=ACTIVATION)
        arrays = {name: describe_as_array(name, tensor) for name, tensor in self.tensors.items()}
        x, sample, affine = arrays["x"], self.cell.sample, AffineParameters(arrays["weight"], arrays["bias"])
        if self.dy is None:
            assert isinstance(config, GroupNormForwardConfig)
            out = Forward(arrays["y"])
            forward = GroupNormForwardCall(x=x, sample=sample, affine=affine, options=options, out=out)
            return plan_forward(forward, config)
        assert isinstance(config, GroupNormBackwardConfig)
        backward = GroupNormBackwardCall(
            dy=arrays["dy"],
            x=x,
            sample=sample,
            affine=affine,
            options=options,
            mean=arrays["mean"],
            rstd=arrays["rstd"],
            out=Backward(arrays["dx"], arrays["dweight"], arrays["dbias"]),
        )
        return plan_backward(backward, config)

    @cached_property
    def expected_results(self) -> tuple[Tensor, ...]:
        """Torch's results in float32."""
        leaves = [t.detach().float().requires_grad_(self.dy is not None) for t in (self.x, self.weight, self.bias)]
        y = F.silu(F.group_norm(leaves[0], GROUPS, leaves[1], leaves[2], EPS))
        if self.dy is None:
            return (y,)
        y.backward(self.dy.float())
        return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)

    @property
    def min_bytes(self) -> int:
        """The minimum number of bytes that the pass must move."""
        fewest = traffic.compute_forward_bytes if self.dy is None else traffic.compute_backward_bytes
        return fewest(self.x.numel(), self.x.element_size(), self.x.element_size())

    def check_results(self) -> None:
        """Raises ValueError unless `results` agree with torch's."""
        for index, (actual, right) in enumerate(zip(self.results, self.expected_results, strict=True)):
            if not torch.allclose(actual.float(), right, rtol=2e-2, atol=float(right.abs().max()) * 1e-2):
                raise ValueError(f"result {index} is wrong")


@dataclass(frozen=True, slots=True)
class TimedConfig:
    """A configuration, the median of its times in milliseconds, and the fraction of a copy that it reaches."""

    config: Config
    ms: float
    of_copy: float


@dataclass(frozen=True, slots=True)
class FailedConfig:
    """A configuration that the device refused or that gave a wrong result."""

    config: Config
    error: str


@dataclass(frozen=True, slots=True)
class TuningOutcome:
    """A cell's configurations, the fastest first, and the rate of a copy in bytes per millisecond."""

    cell: GroupNormTuningCell
    roof: float
    timed: list[TimedConfig]
    failed: list[FailedConfig]

    @property
    def summary_line(self) -> str:
        """The best of them, in one line."""
        best = "; ".join(
            f"{row.of_copy:.3f} {row.ms * 1e3:.1f} us {format_config(row.config)}" for row in self.timed[:SHOWN]
        )
        failures = f"; {len(self.failed)} failed: {self.failed[0].error[:60]}" if self.failed else ""
        return f"{self.cell.name}, copy {self.roof / 1e6:.0f} GB/s: {best}{failures}"

    def iterate_rows(self) -> Iterator[list[str]]:
        """Values of COLUMNS."""
        cell = self.cell
        leading = [cell.pass_, "x".join(map(str, cell.shape)), cell.layout, cell.dtype]
        for timed in self.timed:
            yield [*leading, format_config(timed.config), f"{timed.ms:.5f}", f"{timed.of_copy:.4f}", ""]
        for failed in self.failed:
            yield [*leading, format_config(failed.config), "", "", failed.error]


@dataclass(frozen=True, slots=True)
class TuningItem:
    """A cell to time and the results to add its rows to, unless it is `deadline_s` on the monotonic clock."""

    cell: GroupNormTuningCell
    configs: list[Config]
    results: CsvResults
    deadline_s: float


def compile_config(item: tuple[GroupNormTuningCell, Config]) -> None:
    """Fill Triton's cache, in a worker process."""
    cell, config = item
    for step in GroupNormTuningPass(cell, "meta").plan_launches(config):
        step.kernel.warmup(
            *bind_to_meta_tensors(step.arguments), grid=step.grid, enable_fp_fusion=True, **step.options
        )


def select_distinct_kernels(
    work: dict[GroupNormTuningCell, list[Config]],
) -> dict[GroupNormTuningCell, list[tuple[GroupNormTuningCell, Config]]]:
    """One item for each set of kernels, at the first cell that needs it; cells and configurations share kernels."""
    known: set[object] = set()
    kernels: dict[GroupNormTuningCell, list[tuple[GroupNormTuningCell, Config]]] = {}
    for cell, configs in work.items():
        of = GroupNormTuningPass(cell, "meta")
        kernels[cell] = []
        for config in configs:
            key = tuple(
                (step.kernel.fn.__name__, cell.dtype, tuple(sorted(step.options.items())))
                for step in of.plan_launches(config)
            )
            if key not in known:
                known.add(key)
                kernels[cell].append((cell, config))
    return kernels


def compile_cells(
    kernels: dict[GroupNormTuningCell, list[tuple[GroupNormTuningCell, Config]]], seconds: float
) -> list[GroupNormTuningCell]:
    """Compile for each cell in turn; return the cells that were finished in time."""
    workers = count_workers()
    items = [item for of_cell in kernels.values() for item in of_cell]
    began = time.monotonic()
    taken = run_in_workers(compile_config, items, workers, seconds)
    spent = time.monotonic() - began
    # If time ran out, the last items were not finished.
    done = taken - workers if spent > seconds else taken
    print(f"{done} of {len(items)} sets of kernels compiled in {spent:.0f} s", flush=True)
    cells = []
    for cell, of_cell in kernels.items():
        done -= len(of_cell)
        if done < 0:
            break
        cells.append(cell)
    return cells


def time_cell(
    cell: GroupNormTuningCell, configs: Iterable[Config], timer: DeviceTimer, device: str = "cuda"
) -> TuningOutcome:
    """Time every configuration that agrees with torch; stop after a permanent device error."""
    of = GroupNormTuningPass(cell, device)
    roof = 2 * of.x.nbytes / timer(lambda: of.results[0].copy_(of.x)).p50
    timed, failed = [], []
    for config in configs:
        try:
            plan = of.plan_launches(config)
            for result in of.results:
                result.fill_(float("nan"))
            run_launches(of.x.device, plan, of.tensors)
            of.check_results()
            ms = timer(partial(run_launches, of.x.device, plan, of.tensors), repeats=20, warmup=2).p50
        except Exception as error:
            failed.append(FailedConfig(config, " ".join(str(error).split())[:200]))
            if _is_permanent(failed[-1]):
                break
            continue
        timed.append(TimedConfig(config, ms, of.min_bytes / ms / roof))
    return TuningOutcome(cell, roof, sorted(timed, key=lambda row: row.ms), failed)


_timer = cache(DeviceTimer)


def time_item(item: TuningItem) -> None:
    """Time one cell in a process that times several, and write and print the outcome."""
    if time.monotonic() > item.deadline_s:
        return
    outcome = time_cell(item.cell, item.configs, _timer())
    for row in outcome.iterate_rows():
        item.results.add_row(dict(zip(COLUMNS, row, strict=True)))
    print(outcome.summary_line, flush=True)
    if outcome.failed and _is_permanent(outcome.failed[-1]):
        raise RuntimeError(outcome.failed[-1].error)  # Another process takes the next cell.


def _is_permanent(failure: FailedConfig) -> bool:
    return "CUDA error" in failure.error
