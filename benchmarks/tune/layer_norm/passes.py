"""The passes of LayerNorm tuning: a cell's tensors, and its launches with a configuration."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from fusednorm import traffic
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.launch import Launch
from fusednorm.launch.run import run
from fusednorm.ops.layer_norm.call import BackwardCall, ForwardCall
from fusednorm.ops.layer_norm.choice import plan_backward, plan_forward
from fusednorm.ops.layer_norm.table import BackwardConfig, ForwardConfig
from fusednorm.results import Backward, Forward

from benchmarks.workload.cells import sweep_rows
from benchmarks.workload.problem import EPS

Config = ForwardConfig | BackwardConfig

OPTIONS = NormOptions("layer_norm", eps=EPS)


@dataclass(frozen=True, slots=True)
class Cell:
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


class Pass:
    """The tensors of a cell, and its launches with a configuration."""

    def __init__(self, cell: Cell, device: str) -> None:
        rows, cols = cell.rows or sweep_rows(cell.cols, cell.dtype), cell.cols
        options: dict[str, Any] = {"device": device, "dtype": getattr(torch, cell.dtype)}
        fill = torch.empty if device == "meta" else torch.randn
        self._pass = cell.pass_
        self.x, self.dy = (fill(rows, cols, **options) for _ in range(2))
        self.weight, self.bias = (fill(cols, **options) for _ in range(2))
        self.mean, self.rstd = torch.zeros(rows, device=device), torch.ones(rows, device=device)
        shapes = (self.x,) if cell.pass_ == "forward" else (self.x, self.weight, self.bias)
        self.results = tuple(map(torch.empty_like, shapes))

    def plan(self, config: Config | None = None) -> list[Launch]:
        """Launches that write into `results`; with the table's own choice when None."""
        if self._pass == "forward":
            assert config is None or isinstance(config, ForwardConfig)
            out = Forward(*self.results)
            return plan_forward(
                ForwardCall(x=self.x, weight=self.weight, bias=self.bias, options=OPTIONS, out=out), config
            )
        assert config is None or isinstance(config, BackwardConfig)
        call = BackwardCall(
            dy=self.dy, x=self.x, weight=self.weight, bias=self.bias, options=OPTIONS,
            mean=self.mean, rstd=self.rstd, out=Backward(*self.results),
        )  # fmt: skip
        return plan_backward(call, config)

    def run(self, plan: Iterable[Launch]) -> None:
        """Execute the launches of a plan."""
        run(self.x.device, plan)

    @property
    def min_bytes(self) -> int:
        """The minimum number of bytes that the pass must move."""
        fewest = traffic.forward_bytes if self._pass == "forward" else traffic.backward_bytes
        return fewest(self.x.numel(), self.x.element_size(), self.x.element_size())
