"""Other libraries' kernels, called through the functions that their modules call; see `registry` for the contract.

Checked against liger-kernel 0.8.5 and quack-kernels 0.6.5.
"""

from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.workload.problems import EPS, BenchmarkProblem, ProviderRun, Results, drop_none


def make_liger_run(problem: BenchmarkProblem) -> ProviderRun | None:
    """LayerNorm and RMSNorm of rows, contiguous GroupNorm; with a residual of x's dtype, RMSNorm forward."""
    cell = problem.cell
    if cell.layout == "nhwc" or cell.is_over_channels:
        return None
    if cell.variant == "residual" and cell.op == "rms_norm" and cell.pass_ == "forward":
        return _make_liger_add_rms_norm(problem)
    if cell.variant != "plain":
        return None
    return _LIGER[cell.op](problem)


def _make_liger_layer_norm(problem: BenchmarkProblem) -> ProviderRun:
    from liger_kernel.ops.layer_norm import layer_norm_backward, layer_norm_forward

    x, weight, bias = problem.x, problem.weight, problem.bias
    if problem.cell.pass_ == "forward":
        return ProviderRun(lambda: layer_norm_forward(x, weight, bias, EPS)[:1])
    _, _, mean, rstd, *_ = layer_norm_forward(x, weight, bias, EPS)
    return ProviderRun(lambda: layer_norm_backward(problem.dy, x, weight, bias, mean, rstd))


# LigerRMSNorm's defaults.
_LIGER_RMS: dict[str, Any] = {"offset": 0.0, "casting_mode": "llama"}


def _make_liger_rms_norm(problem: BenchmarkProblem) -> ProviderRun:
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    x, weight = problem.x, problem.weight
    if problem.cell.pass_ == "forward":
        return ProviderRun(lambda: rms_norm_forward(x, weight, EPS, **_LIGER_RMS, row_mode=None)[:1])
    _, _, rstd, block, num_warps, mode = rms_norm_forward(x, weight, EPS, **_LIGER_RMS, row_mode=None)
    dy = torch.empty_like(problem.dy)

    def backward() -> Results:
        """In place, as in the module: dx overwrites dy."""
        dx, dweight = rms_norm_backward(dy, x, weight, rstd, 0.0, mode, block, num_warps, True, None)
        return dx, dweight

    return ProviderRun(backward, restore_inputs=lambda: dy.copy_(problem.dy))


def _make_liger_add_rms_norm(problem: BenchmarkProblem) -> ProviderRun:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward as forward

    return ProviderRun(lambda: forward(problem.x, problem.residual, problem.weight, EPS, **_LIGER_RMS)[:2])


def _make_liger_group_norm(problem: BenchmarkProblem) -> ProviderRun:
    from liger_kernel.ops.group_norm import group_norm_backward, group_norm_forward

    n, c, *spatial = problem.cell.shape
    groups, x, dy = problem.cell.groups, problem.x.view(n, c, -1), problem.dy.view(n, c, -1)
    arguments = (c, groups, problem.weight, problem.bias, EPS)
    if problem.cell.pass_ == "forward":
        return ProviderRun(lambda: (group_norm_forward(x, *arguments)[0].view(n, c, *spatial),))
    _, _, mean, rstd, *_ = group_norm_forward(x, *arguments)

    def backward() -> Results:
        dx, *parameters = group_norm_backward(dy, x, problem.weight, problem.bias, mean, rstd, c, groups)
        return (dx.view(n, c, *spatial), *parameters)

    return ProviderRun(backward)


_LIGER = {
    "layer_norm": _make_liger_layer_norm,
    "rms_norm": _make_liger_rms_norm,
    "group_norm": _make_liger_group_norm,
}


def make_liger_cute_run(problem: BenchmarkProblem) -> ProviderRun | None:
    """LayerNorm and RMSNorm of rows by the CuTe kernels that Liger's functions choose with nvidia-cutlass-dsl.

    For rows that those do not have, as of LayerNorm with gradients beyond 8192 columns, they choose Triton's.
    """
    cell, x = problem.cell, problem.x
    if cell.variant != "plain" or cell.layout != "rows":
        return None
    from liger_kernel import functional

    parameters = drop_none((problem.weight, problem.bias))
    normalise = partial(getattr(functional, cell.op), eps=EPS, impl="nvidia-cutedsl")
    if cell.pass_ == "forward":
        return ProviderRun(lambda: (normalise(x, *parameters),))
    leaves = [tensor.detach().requires_grad_() for tensor in (x, *parameters)]
    y, dy = normalise(*leaves), problem.dy
    return ProviderRun(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True))


def make_quack_run(problem: BenchmarkProblem) -> ProviderRun | None:
    """LayerNorm of rows, with parameters in float32, which it requires, and RMSNorm.

    RMSNorm also by head, and forward with a residual.  Backward with a residual stream of another dtype gives dx in
    the stream's dtype only, which is another operation.
    """
    cell = problem.cell
    if cell.is_over_channels:
        return None
    if cell.op == "layer_norm" and cell.variant == "plain":
        return _make_quack_layer_norm(problem)
    if cell.op == "rms_norm" and (cell.variant, cell.pass_) in _QUACK_RMS:
        return _make_quack_rms_norm(problem)
    return None


_QUACK_RMS = {
    *product(("plain", "per_head"), ("forward", "backward")),
    ("residual", "forward"),
    ("residual_float32", "forward"),
}


def _make_quack_layer_norm(problem: BenchmarkProblem) -> ProviderRun:
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    assert problem.weight is not None
    assert problem.bias is not None
    x, weight, bias = problem.x, problem.weight.float(), problem.bias.float()
    if problem.cell.pass_ == "forward":
        return ProviderRun(lambda: (layernorm_fwd(x, weight, bias, EPS),))
    _, rstd, mean = layernorm_fwd(x, weight, bias, EPS, return_rstd=True, return_mean=True)
    return ProviderRun(lambda: layernorm_bwd(x, weight, problem.dy, rstd, mean))


def _make_quack_rms_norm(problem: BenchmarkProblem) -> ProviderRun:
    from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

    x, weight, residual = problem.x, problem.weight, problem.residual
    if problem.cell.pass_ == "forward":
        count = 1 if residual is None else 2
        return ProviderRun(lambda: rmsnorm_fwd(x, weight, residual=residual, eps=EPS)[:count])
    *_, rstd = rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)
    return ProviderRun(lambda: rmsnorm_bwd(x, weight, problem.dy, rstd)[:2])


def make_tutorial_run(problem: BenchmarkProblem) -> ProviderRun | None:
    """LayerNorm forward over rows of at most 64 KB, which is the tutorial's limit too."""
    from benchmarks.providers.tutorial import can_fit_block, layer_norm_forward

    cell = problem.cell
    if (cell.op, cell.pass_, cell.variant) != ("layer_norm", "forward", "plain"):
        return None
    if cell.is_over_channels or not can_fit_block(problem.x):
        return None
    assert problem.weight is not None
    assert problem.bias is not None
    x, weight, bias = problem.x, problem.weight, problem.bias
    return ProviderRun(lambda: (layer_norm_forward(x, weight, bias, EPS),))
