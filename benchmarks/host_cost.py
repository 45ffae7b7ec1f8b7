"""What one forward call costs the host: Python and launch, for a single short row with nothing new about it.

    python -m benchmarks.host_cost --out benchmarks/results/host.csv

Rounds of calls between synchronisations, short enough that the queue of launches never fills; a round's time over
its calls is one sample.  Three variants: `host` is the bare forward pass, `host_operator` the differentiable
function where nothing needs a gradient, `host_autograd` where x and the parameters do.
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

from benchmarks import records
from benchmarks.cells import Cell
from benchmarks.oracle import Oracle
from benchmarks.problem import EPS, Problem, Results, Run, Tensors
from benchmarks.progress import Progress
from benchmarks.providers import available
from benchmarks.timing import Quantiles, quantiles

CELL = Cell("layer_norm", "forward", "plain", (1, 4096), 0, "bfloat16", "rows")

Calls = dict[str, Callable[[], Any]]
"""By variant; every argument is at hand, so that little but the call itself is timed."""


def _ours(x: Tensor, weight: Tensor, bias: Tensor) -> Calls:
    forward, operator = fusednorm.layer_norm_forward, fusednorm.layer_norm
    x_leaf, weight_leaf, bias_leaf = _leaves(x, weight, bias)
    return {
        "host": lambda: forward(x, weight, bias, eps=EPS),
        "host_operator": lambda: operator(x, weight, bias, EPS),
        "host_autograd": lambda: operator(x_leaf, weight_leaf, bias_leaf, EPS),
    }


def _torch(x: Tensor, weight: Tensor, bias: Tensor) -> Calls:
    layer_norm, size = F.layer_norm, x.shape[-1:]
    x_leaf, weight_leaf, bias_leaf = _leaves(x, weight, bias)
    return {
        "host": lambda: layer_norm(x, size, weight, bias, EPS),
        "host_autograd": lambda: layer_norm(x_leaf, size, weight_leaf, bias_leaf, EPS),
    }


def _liger(x: Tensor, weight: Tensor, bias: Tensor) -> Calls:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction, layer_norm_forward

    leaves = _leaves(x, weight, bias)
    return {
        "host": lambda: layer_norm_forward(x, weight, bias, EPS),
        "host_autograd": lambda: LigerLayerNormFunction.apply(*leaves, EPS),
    }


def _quack(x: Tensor, weight: Tensor, bias: Tensor) -> Calls:
    from quack.rmsnorm import layernorm_fwd

    weight, bias = weight.float(), bias.float()
    return {"host": lambda: layernorm_fwd(x, weight, bias, EPS)}


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


CALLS = {"fusednorm": _ours, "torch": _torch, "liger": _liger, "quack": _quack}


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
    problem = Problem(CELL, Tensors())
    machine = records.machine(arguments.commit)
    providers = available(CALLS)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file, Progress(len(providers)) as progress:
        writer = csv.DictWriter(file, records.COLUMNS)
        writer.writeheader()
        for provider in providers:
            try:
                rows = list(_rows(provider, problem, Oracle(problem)))
            except Exception as error_of_provider:
                progress.step(f"{provider}: {str(error_of_provider)[:300]}")
                continue
            writer.writerows(machine | row for row in rows)
            progress.step(f"{provider}: " + ", ".join(f"{row['variant']} {row['ms_p50']} ms" for row in rows))


def _rows(provider: str, problem: Problem, oracle: Oracle) -> Iterator[dict[str, object]]:
    assert problem.weight is not None
    assert problem.bias is not None
    for variant, call in CALLS[provider](problem.x, problem.weight, problem.bias).items():
        error = oracle.error(Run(partial(_checked, call)))
        time_ms = host_time(call, torch.cuda.synchronize)
        yield records.row(replace(CELL, variant=variant), provider, time_ms, error)


def _checked(call: Callable[[], Any]) -> Results:
    """y alone, for the oracle."""
    result = call()
    return (result.detach() if isinstance(result, Tensor) else result[0],)


if __name__ == "__main__":
    main()
