"""Helion's kernels of LayerNorm and RMSNorm over rows; see `registry` for the contract.

Its package has none, so they are imported from a checkout of its repository on PYTHONPATH, as that repository
imports them: `examples` has both passes, which Helion tunes for each shape when it is first called, for as long as
HELION_AUTOTUNE_EFFORT and HELION_AUTOTUNE_BUDGET_SECONDS say; `pretuned_kernels` has forward passes, with
configurations that Helion publishes for a GPU.

Checked against helion 1.5.1 and its repository at ef091f4.
"""

from importlib import import_module
from typing import Any

import torch

from benchmarks.workload.problems import EPS, BenchmarkProblem, ProviderRun


def make_helion_run(problem: BenchmarkProblem) -> ProviderRun | None:
    """Both passes by the examples, of which the forward pass also writes statistics.

    Those that a backward pass needs are torch's, so that it does not wait until the forward pass is tuned, too.
    """
    if not _is_plain_row_norm(problem):
        return None
    x, weight, bias, dy = problem.x, problem.weight, problem.bias, problem.dy
    kernels: Any = import_module(f"examples.{problem.cell.op}")
    if problem.cell.op == "layer_norm":
        if problem.cell.pass_ == "forward":
            return ProviderRun(lambda: kernels.layer_norm_fwd(x, [x.shape[1]], weight, bias, EPS)[:1])
        variance, mean = torch.var_mean(x.float(), dim=1, correction=0)
        rstd = (variance + EPS).rsqrt()
        return ProviderRun(lambda: kernels.layer_norm_bwd(dy, x, mean, rstd, weight))
    if problem.cell.pass_ == "forward":
        return ProviderRun(lambda: kernels.rms_norm_fwd(x, weight, EPS)[:1])
    rstd = (x.float().square().mean(dim=1, keepdim=True) + EPS).rsqrt()
    return ProviderRun(lambda: kernels.rms_norm_bwd(dy, x, weight, rstd))


def make_pretuned_helion_run(problem: BenchmarkProblem) -> ProviderRun | None:
    """The forward pass with published configurations; that of LayerNorm has `EPS` in its code."""
    if not _is_plain_row_norm(problem) or problem.cell.pass_ != "forward":
        return None
    x, weight, bias = problem.x, problem.weight, problem.bias
    op = problem.cell.op
    kernel: Any = getattr(import_module(f"pretuned_kernels.{op}.{op}"), op)
    parameters = (weight, bias) if op == "layer_norm" else (weight, EPS)
    return ProviderRun(lambda: (kernel(x, *parameters),))


def _is_plain_row_norm(problem: BenchmarkProblem) -> bool:
    return (problem.cell.variant, problem.cell.layout) == ("plain", "rows")
