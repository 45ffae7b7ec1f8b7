"""Who is timed: one function a provider, which turns a problem into a call, or into None where it has none.

A provider that cannot be imported is left out.  Every call is the whole pass: with a residual or an activation,
whatever the provider needs for them is inside.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import fusednorm
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm import traffic
from torch import Tensor

from benchmarks.cells import Cell

Call = Callable[[], tuple[Tensor, ...]]
EPS = 1e-5


@dataclass
class Problem:
    """The tensors of one cell, random and on the GPU."""

    cell: Cell

    def _random(self) -> Tensor:
        x = torch.randn(self.cell.shape, device="cuda", dtype=self.dtype)
        return x if self.cell.layout != "nhwc" else _channels_last(x)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.cell.dtype)  # type: ignore[no-any-return]

    @cached_property
    def x(self) -> Tensor:
        return self._random()

    @cached_property
    def dy(self) -> Tensor:
        return self._random()

    @cached_property
    def residual(self) -> Tensor | None:
        return self._random() if self.cell.variant == "residual" else None

    @cached_property
    def weight(self) -> Tensor:
        size = self.cell.shape[1] if self.cell.groups else self.cell.shape[-1]
        return torch.randn(size, device="cuda", dtype=self.dtype)

    @cached_property
    def bias(self) -> Tensor | None:
        return None if self.cell.op == "rms_norm" else torch.randn_like(self.weight)

    @property
    def min_bytes(self) -> int:
        """The fewest bytes that the pass must move."""
        size, numel = self.x.element_size(), self.x.numel()
        extra = size if self.residual is not None else 0
        if self.cell.pass_ == "forward":
            return traffic.forward_bytes(numel, size, size, residual=extra, residual_out=extra)
        return traffic.backward_bytes(numel, size, size, residual=extra)


def _channels_last(x: Tensor) -> Tensor:
    axes = [0, *range(2, x.ndim), 1]
    return x.permute(axes).contiguous().permute([0, x.ndim - 1, *range(1, x.ndim - 1)])


def plain_torch(cell: Cell, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Any:
    """The operation as one writes it in torch."""
    h = x if residual is None else x + residual
    if cell.op == "layer_norm":
        y = F.layer_norm(h, x.shape[-1:], weight, bias, EPS)
    elif cell.op == "rms_norm":
        y = F.rms_norm(h, x.shape[-1:], weight, EPS)
    else:
        y = F.group_norm(h, cell.groups, weight, bias, EPS)
    match cell.activation:
        case "relu":
            y = F.relu(y)
        case "silu":
            y = F.silu(y)
        case "gelu_tanh":
            y = F.gelu(y, approximate="tanh")
    return y if residual is None else (y, h)


def ours(problem: Problem) -> Call:
    cell = problem.cell
    leading = (problem.x, cell.groups) if cell.groups else (problem.x,)
    parameters = (problem.weight,) if cell.op == "rms_norm" else (problem.weight, problem.bias)
    options = {"eps": EPS, "activation": cell.activation, "residual": problem.residual}
    forward = getattr(fusednorm, f"{cell.op}_forward")
    if cell.pass_ == "forward":
        return lambda: _present(forward(*leading, *parameters, **options))
    backward = getattr(fusednorm, f"{cell.op}_backward")
    saved = forward(*leading, *parameters, stats=True, **options)
    statistics = {"rstd": saved.rstd} if cell.op == "rms_norm" else {"mean": saved.mean, "rstd": saved.rstd}
    return lambda: _present(backward(problem.dy, *leading, *parameters, **statistics, **options))


def _present(result: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    return tuple(t for t in result if t is not None)


def _differentiated(problem: Problem, function: Callable[..., Any]) -> Call:
    """The pass through autograd: the backward graph is kept, so that it alone is timed."""
    if problem.cell.pass_ == "forward":

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                result = function(problem.cell, problem.x, problem.weight, problem.bias, problem.residual)
            return result if isinstance(result, tuple) else (result,)

        return forward
    leaves = [t.detach().requires_grad_() for t in _present((problem.x, problem.weight, problem.bias))]
    bias = leaves[2] if problem.bias is not None else None
    y = function(problem.cell, leaves[0], leaves[1], bias, problem.residual)
    return lambda: torch.autograd.grad(y, leaves, problem.dy, retain_graph=True)


def eager(problem: Problem) -> Call:
    return _differentiated(problem, plain_torch)


def compiled(problem: Problem) -> Call:
    torch._dynamo.reset()
    return _differentiated(problem, torch.compile(plain_torch, dynamic=False))


def liger(problem: Problem) -> Call | None:
    cell = problem.cell
    if cell.variant != "plain" or cell.layout == "nhwc":
        return None
    if cell.op == "group_norm":
        return _liger_group_norm(problem)
    if cell.op == "rms_norm":
        return None
    from liger_kernel.ops.layer_norm import layer_norm_backward, layer_norm_forward

    forward = layer_norm_forward(problem.x, problem.weight, problem.bias, EPS)
    if cell.pass_ == "forward":
        return lambda: layer_norm_forward(problem.x, problem.weight, problem.bias, EPS)[:1]
    mean, rstd = forward[2], forward[3]
    return lambda: layer_norm_backward(problem.dy, problem.x, problem.weight, problem.bias, mean, rstd)


def _liger_group_norm(problem: Problem) -> Call:
    from liger_kernel.ops.group_norm import group_norm_backward, group_norm_forward

    n, c, *spatial = problem.cell.shape
    groups, x, dy = problem.cell.groups, problem.x.view(n, c, -1), problem.dy.view(n, c, -1)
    arguments = (c, groups, problem.weight, problem.bias, EPS)
    forward = group_norm_forward(x, *arguments)
    if problem.cell.pass_ == "forward":
        return lambda: (group_norm_forward(x, *arguments)[0].view(n, c, *spatial),)
    mean, rstd = forward[2], forward[3]

    def backward() -> tuple[Tensor, ...]:
        dx, *parameters = group_norm_backward(dy, x, problem.weight, problem.bias, mean, rstd, c, groups)
        return (dx.view(n, c, *spatial), *parameters)

    return backward


def copy(problem: Problem) -> Call:
    target = torch.empty_like(problem.x)
    return lambda: (target.copy_(problem.x),)


PROVIDERS: dict[str, Callable[[Problem], Call | None]] = {"fusednorm": ours, "torch": eager, "compile": compiled}
if importlib.util.find_spec("liger_kernel"):
    PROVIDERS["liger"] = liger
