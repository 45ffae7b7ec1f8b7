"""The passes of GroupNorm tuning: a cell's tensors, its launches with a configuration, and expected results."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import kernel_bytes
from fusednorm.arguments.options import NormOptions
from fusednorm.launch.launches import Launch
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
from fusednorm.tensors.arrays import describe
from torch import Tensor

from benchmarks.tune.group_norm import backward_candidates, forward_candidates
from benchmarks.workload.problems import EPS

Config = GroupNormForwardConfig | GroupNormBackwardConfig

CANDIDATES: dict[str, Callable[[SampleShape, int, int], Iterator[Config]]] = {
    "forward": forward_candidates.iterate_candidates,
    "backward": backward_candidates.iterate_candidates,
}
GROUPS = 32
ACTIVATION = "silu"


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
        arrays = {name: describe(name, tensor) for name, tensor in self.tensors.items()}
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
        fewest = kernel_bytes.compute_forward_bytes if self.dy is None else kernel_bytes.compute_backward_bytes
        return fewest(self.x.numel(), self.x.element_size(), self.x.element_size())

    def check_results(self) -> None:
        """Raises ValueError unless `results` agree with torch's."""
        for index, (actual, right) in enumerate(zip(self.results, self.expected_results, strict=True)):
            if not torch.allclose(actual.float(), right, rtol=2e-2, atol=float(right.abs().max()) * 1e-2):
                raise ValueError(f"result {index} is wrong")
