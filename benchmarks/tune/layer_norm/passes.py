"""The passes of LayerNorm tuning: a cell's tensors, and its launches with a configuration."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from fusednorm import kernel_bytes
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.execution import run_launches
from fusednorm.launch.launches import Launch
from fusednorm.ops.layer_norm.call import LayerNormBackwardCall, LayerNormForwardCall
from fusednorm.ops.layer_norm.choices import plan_backward, plan_forward
from fusednorm.ops.layer_norm.config_tables import BackwardConfig, ForwardConfig
from fusednorm.results import Backward, Forward
from fusednorm.tensors.arrays import describe

from benchmarks.workload.benchmark_cells import compute_sweep_rows
from benchmarks.workload.problems import EPS

Config = ForwardConfig | BackwardConfig

OPTIONS = NormOptions("layer_norm", eps=EPS)


@dataclass(frozen=True, slots=True)
class LayerNormTuningCell:
    """One pass over rows of one length; x has `rows` rows, by default 256 MiB."""

    pass_: str
    cols: int
    dtype: str
    rows: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize


class LayerNormTuningPass:
    """The tensors of a cell, and its launches with a configuration."""

    def __init__(self, cell: LayerNormTuningCell, device: str) -> None:
        rows, cols = cell.rows or compute_sweep_rows(cell.cols, cell.dtype), cell.cols
        options: dict[str, Any] = {"device": device, "dtype": getattr(torch, cell.dtype)}
        fill = torch.empty if device == "meta" else torch.randn
        self._pass = cell.pass_
        self.x = fill(rows, cols, **options)
        weight, bias = (fill(cols, **options) for _ in range(2))
        self._tensors = {"x": self.x, "weight": weight, "bias": bias}
        results = {"y": self.x}
        if cell.pass_ == "backward":
            self._tensors["dy"] = fill(rows, cols, **options)
            self._tensors |= {"mean": torch.zeros(rows, device=device), "rstd": torch.ones(rows, device=device)}
            results = {"dx": self.x, "dweight": weight, "dbias": bias}
        self._tensors |= {name: torch.empty_like(like) for name, like in results.items()}
        self.results = tuple(self._tensors[name] for name in results)

    def plan_launches(self, config: Config | None = None) -> list[Launch]:
        """Launches that write into `results`; with the table's own choice when None."""
        arrays: dict[str, Any] = {name: describe(name, tensor) for name, tensor in self._tensors.items()}
        if self._pass == "forward":
            assert config is None or isinstance(config, ForwardConfig)
            out = Forward(arrays.pop("y"))
            return plan_forward(LayerNormForwardCall(**arrays, options=OPTIONS, out=out), config)
        assert config is None or isinstance(config, BackwardConfig)
        gradients = Backward(arrays.pop("dx"), arrays.pop("dweight"), arrays.pop("dbias"))
        return plan_backward(LayerNormBackwardCall(**arrays, options=OPTIONS, out=gradients), config)

    def run_launches(self, plan: Iterable[Launch]) -> None:
        """Execute the launches of a plan."""
        run_launches(self.x.device, plan, self._tensors)

    @property
    def min_bytes(self) -> int:
        """The minimum number of bytes that the pass must move."""
        fewest = (
            kernel_bytes.compute_forward_bytes if self._pass == "forward" else kernel_bytes.compute_backward_bytes
        )
        return fewest(self.x.numel(), self.x.element_size(), self.x.element_size())
