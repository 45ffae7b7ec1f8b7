"""Who is timed: one function a provider, which turns a problem into a run, or into None where it has none.

Every run is the whole pass: with a residual, an activation or dropout, whatever the provider needs for them is
inside.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import fusednorm
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks import peers
from benchmarks.cells import Cell
from benchmarks.problem import EPS, SEED, Problem, Results, Run, present

Provider = Callable[[Problem], Run | None]


def plain_torch(cell: Cell, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Any:
    """The operation as one writes it in torch."""
    h = x if residual is None else x + residual
    if cell.op == "layer_norm":
        y = F.layer_norm(h, x.shape[-1:], weight, bias, EPS)
    elif cell.op == "rms_norm":
        y = F.rms_norm(h, x.shape[-1:], weight, EPS)
    else:
        y = F.group_norm(h, cell.groups, weight, bias, EPS)
    match cell.spec.activation:
        case "relu":
            y = F.relu(y)
        case "silu":
            y = F.silu(y)
        case "gelu_tanh":
            y = F.gelu(y, approximate="tanh")
    if cell.spec.dropout:
        y = F.dropout(y, cell.spec.dropout)
    return y if residual is None else (y, h)


def ours(problem: Problem) -> Run:
    """The launchers, without autograd."""
    cell = problem.cell
    leading = (problem.x, cell.groups) if cell.groups else (problem.x,)
    parameters = (problem.weight,) if cell.op == "rms_norm" else (problem.weight, problem.bias)
    options = {"eps": EPS, "activation": cell.spec.activation, "residual": problem.residual}
    if cell.spec.dropout:
        options |= {"dropout": cell.spec.dropout, "seed": SEED}
    forward = getattr(fusednorm, f"{cell.op}_forward")
    if cell.pass_ == "forward":
        return Run(lambda: present(forward(*leading, *parameters, **options)))
    backward = getattr(fusednorm, f"{cell.op}_backward")
    saved = forward(*leading, *parameters, stats=True, **options)
    statistics = {"rstd": saved.rstd} if cell.op == "rms_norm" else {"mean": saved.mean, "rstd": saved.rstd}
    return Run(lambda: present(backward(problem.dy, *leading, *parameters, **statistics, **options)))


def eager(problem: Problem) -> Run:
    """`plain_torch` as it stands."""
    return _differentiated(problem, plain_torch)


def compiled(problem: Problem) -> Run:
    """`plain_torch` under torch.compile, for this shape alone."""
    torch.compiler.reset()
    return _differentiated(problem, torch.compile(plain_torch, dynamic=False))


def _differentiated(problem: Problem, function: Callable[..., Any]) -> Run:
    """The pass through autograd: the backward graph is kept, so that it alone is timed."""
    cell = problem.cell
    if cell.pass_ == "forward":

        def forward() -> Results:
            with torch.no_grad():
                result = function(cell, problem.x, problem.weight, problem.bias, problem.residual)
            return result if isinstance(result, tuple) else (result,)

        return Run(forward, keep=(lambda results: results[0] != 0) if cell.spec.dropout else None)

    def graph(tensors: Results, residual: Tensor | None) -> tuple[Tensor, Results]:
        leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)
        bias = leaves[2] if problem.bias is not None else None
        torch.manual_seed(SEED)
        result = function(cell, leaves[0], leaves[1], bias, residual)
        return result if residual is None else result[0], leaves

    inputs, residual = present((problem.x, problem.weight, problem.bias)), problem.residual
    y, leaves = graph(inputs, residual)
    mask = None
    if cell.spec.dropout:
        # Of ones everywhere y is not 0 but where the same mask makes it 0.
        ones = tuple(map(torch.ones_like, inputs))
        mask = graph(ones, None if residual is None else torch.ones_like(residual))[0].detach() != 0
    return Run(
        lambda: torch.autograd.grad(y, leaves, problem.dy, retain_graph=True),
        keep=None if mask is None else lambda _: mask,
    )


def copy(problem: Problem) -> Run:
    """The roof: a copy of x."""
    target = torch.empty_like(problem.x)
    return Run(lambda: (target.copy_(problem.x),))


PROVIDERS: dict[str, Provider] = {
    "fusednorm": ours,
    "torch": eager,
    "compile": compiled,
    "liger": peers.liger,
    "quack": peers.quack,
    "tutorial": peers.tutorial,
}

PACKAGES = {"liger": "liger_kernel", "quack": "quack"}
"""What must be importable for a provider to take part."""


def available(names: Iterable[str]) -> dict[str, Provider]:
    """Those of `names` whose packages can be imported, in that order; stderr says who is left out and why."""
    found = {}
    for name in names:
        try:
            if name in PACKAGES:
                importlib.import_module(PACKAGES[name])
        except Exception as error:  # a package may be there and fail in its own ways, a missing .so among them
            print(f"{name} is left out: {error}", file=sys.stderr)
        else:
            found[name] = PROVIDERS[name]
    return found
