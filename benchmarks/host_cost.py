"""What one call costs the host: Python and launches, for work that is small and has nothing new about it.

    python -m benchmarks.host_cost --out benchmarks/results/host.csv

LayerNorm forward of a single short row; GroupNorm of two samples, both passes in both layouts.  Rounds of calls
between synchronisations, short enough that the queue of launches never fills; a round's time over its calls is one
sample.  Three variants: `host` is the bare pass, `host_operator` the differentiable function where nothing needs a
gradient, `host_autograd` where x and the parameters do, or backward what torch makes of their gradients.
"""

import argparse
import csv
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fusednorm
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.harness import records
from benchmarks.harness.oracle import Oracle
from benchmarks.harness.progress import Progress
from benchmarks.harness.timing import Quantiles, quantiles
from benchmarks.providers.registry import available
from benchmarks.workload.cells import Cell
from benchmarks.workload.problem import EPS, Problem, Results, Run, Tensors

CELLS = (
    Cell("layer_norm", "forward", "plain", (1, 4096), 0, "bfloat16", "rows"),
    *(
        Cell("group_norm", pass_, "plain", (2, 1280, 16, 16), 32, "bfloat16", layout)
        for pass_ in ("forward", "backward")
        for layout in ("nchw", "nhwc")
    ),
)

Calls = dict[str, Callable[[], Any]]
"""By variant; every argument is at hand, so that little but the call itself is timed."""

Parameters = tuple[Tensor, Tensor]
"""weight and bias."""


def _our_rows(problem: Problem, parameters: Parameters) -> Calls:
    forward, operator, x = fusednorm.layer_norm_forward, fusednorm.layer_norm, problem.x
    weight, bias = parameters
    x_leaf, weight_leaf, bias_leaf = _leaves(x, weight, bias)
    return {
        "host": lambda: forward(x, weight, bias, eps=EPS),
        "host_operator": lambda: operator(x, weight, bias, EPS),
        "host_autograd": lambda: operator(x_leaf, weight_leaf, bias_leaf, EPS),
    }


def _torch_rows(problem: Problem, parameters: Parameters) -> Calls:
    layer_norm, x, size = F.layer_norm, problem.x, problem.x.shape[-1:]
    weight, bias = parameters
    x_leaf, weight_leaf, bias_leaf = _leaves(x, weight, bias)
    return {
        "host": lambda: layer_norm(x, size, weight, bias, EPS),
        "host_autograd": lambda: layer_norm(x_leaf, size, weight_leaf, bias_leaf, EPS),
    }


def _liger_rows(problem: Problem, parameters: Parameters) -> Calls:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction, layer_norm_forward

    x, (weight, bias) = problem.x, parameters
    leaves = _leaves(x, weight, bias)
    return {
        "host": lambda: layer_norm_forward(x, weight, bias, EPS),
        "host_autograd": lambda: LigerLayerNormFunction.apply(*leaves, EPS),
    }


def _quack_rows(problem: Problem, parameters: Parameters) -> Calls:
    from quack.rmsnorm import layernorm_fwd

    x, weight, bias = problem.x, *(parameter.float() for parameter in parameters)
    return {"host": lambda: layernorm_fwd(x, weight, bias, EPS)}


def _our_groups(problem: Problem, parameters: Parameters) -> Calls:
    forward, backward, operator = fusednorm.group_norm_forward, fusednorm.group_norm_backward, fusednorm.group_norm
    x, dy, groups, (weight, bias) = problem.x, problem.dy, problem.cell.groups, parameters
    x_leaf, weight_leaf, bias_leaf = leaves = _leaves(x, weight, bias)
    if problem.cell.pass_ == "forward":
        return {
            "host": lambda: forward(x, groups, weight, bias, eps=EPS),
            "host_operator": lambda: operator(x, groups, weight, bias, EPS),
            "host_autograd": lambda: operator(x_leaf, groups, weight_leaf, bias_leaf, EPS),
        }
    saved = forward(x, groups, weight, bias, eps=EPS, stats=True)
    mean, rstd = saved.mean, saved.rstd
    return {
        "host": lambda: backward(dy, x, groups, weight, bias, eps=EPS, mean=mean, rstd=rstd),
        "host_autograd": _gradients(operator(x_leaf, groups, weight_leaf, bias_leaf, EPS), leaves, dy),
    }


def _torch_groups(problem: Problem, parameters: Parameters) -> Calls:
    group_norm, x, dy, groups = F.group_norm, problem.x, problem.dy, problem.cell.groups
    weight, bias = parameters
    x_leaf, weight_leaf, bias_leaf = leaves = _leaves(x, weight, bias)
    if problem.cell.pass_ == "forward":
        return {
            "host": lambda: group_norm(x, groups, weight, bias, EPS),
            "host_autograd": lambda: group_norm(x_leaf, groups, weight_leaf, bias_leaf, EPS),
        }
    sizes = (x.shape[0], x.shape[1], x[0, 0].numel(), groups)
    # Contiguous as `F.group_norm` and its derivative make them, which costs a copy of what is channels-last.
    _, mean, rstd = torch.native_group_norm(x.contiguous(), weight, bias, *sizes, EPS)
    backward, wanted = torch.ops.aten.native_group_norm_backward, [True] * 3
    return {
        "host": lambda: backward(dy.contiguous(), x.contiguous(), mean, rstd, weight, *sizes, wanted),
        "host_autograd": _gradients(group_norm(x_leaf, groups, weight_leaf, bias_leaf, EPS), leaves, dy),
    }


def _gradients(y: Tensor, leaves: list[Tensor], dy: Tensor) -> Callable[[], Any]:
    gradient = torch.autograd.grad
    return lambda: gradient(y, leaves, dy, retain_graph=True)


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


CALLS: dict[str, dict[str, Callable[[Problem, Parameters], Calls]]] = {
    "layer_norm": {"fusednorm": _our_rows, "torch": _torch_rows, "liger": _liger_rows, "quack": _quack_rows},
    "group_norm": {"fusednorm": _our_groups, "torch": _torch_groups},
}
"""By operation and provider."""


def calls_of(provider: str, problem: Problem) -> Calls:
    """The calls that a provider has for a problem with weight and bias."""
    assert problem.weight is not None
    assert problem.bias is not None
    return CALLS[problem.cell.op][provider](problem, (problem.weight, problem.bias))


def host_time(
    call: Callable[[], object], synchronize: Callable[[], object], rounds: int = 200, calls_a_round: int = 50
) -> Quantiles:
    """Host milliseconds of one call."""
    samples = []
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds + 1):
            synchronize()
            began = time.perf_counter_ns()
            for _ in range(calls_a_round):
                call()
            samples.append((time.perf_counter_ns() - began) / calls_a_round / 1e6)
    finally:
        if collects:
            gc.enable()
    synchronize()
    return quantiles(samples[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    parser.add_argument("--commit", default="", help="recorded in the CSV; asked of git when empty")
    arguments = parser.parse_args()
    machine = records.machine(arguments.commit)
    tensors, present = Tensors(), available(CALLS["layer_norm"])
    timed = [(cell, provider) for cell in CELLS for provider in CALLS[cell.op] if provider in present]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file, Progress(len(timed)) as progress:
        writer = csv.DictWriter(file, records.COLUMNS)
        writer.writeheader()
        for cell, provider in timed:
            label = f"{cell.op} {cell.pass_} {cell.layout} {provider}"
            try:
                rows = list(_rows(provider, Problem(cell, tensors)))
            except Exception as error_of_provider:
                progress.step(f"{label}: {str(error_of_provider)[:300]}")
                continue
            writer.writerows(machine | row for row in rows)
            progress.step(f"{label}: " + ", ".join(f"{row['variant']} {row['ms_p50']} ms" for row in rows))


def _rows(provider: str, problem: Problem) -> Iterator[dict[str, object]]:
    oracle = Oracle(problem)
    for variant, call in calls_of(provider, problem).items():
        error = oracle.error(Run(partial(checked, call, problem.cell.pass_)))
        time_ms = host_time(call, torch.cuda.synchronize)
        yield records.row(replace(problem.cell, variant=variant), provider, time_ms, error)


def checked(call: Callable[[], Any], pass_: str) -> Results:
    """What the oracle looks at: y alone, or the gradients of x, weight and bias."""
    result = call()
    results = (result.detach(),) if isinstance(result, Tensor) else tuple(result)
    return results[: 1 if pass_ == "forward" else 3]


if __name__ == "__main__":
    main()
