"""Torch as a provider, eager and compiled, and the copy; see `registry` for the contract."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm.reference.float8 import LARGEST, SMALLEST_SCALE
from fusednorm.tensors.arrays import FLOAT8
from torch import Tensor

from benchmarks.workload.benchmark_cells import KernelCell
from benchmarks.workload.problems import EPS, SEED, BenchmarkProblem, ProviderRun, Results, drop_none


def compute_plain(
    cell: KernelCell,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
) -> Any:
    """The operation in plain torch: y, (y, h) with a residual, or (y, scale) in float8.

    A residual stream wider than x is rounded before the norm, as in models that have one.
    """

    def broadcast(of_samples: Tensor) -> Tensor:
        """[N, cols] over the tokens between, or [N, C] over the positions after."""
        if cell.layout == "samples":
            return of_samples.unsqueeze(1)
        return of_samples.view(*of_samples.shape, *[1] * (x.ndim - 2))

    h = x if gate is None else broadcast(gate) * x
    h = h if residual is None else h + residual
    y = _normalise(cell, h.to(x.dtype), weight, bias)
    if scale is not None and shift is not None:
        y = y * (1 + broadcast(scale)) + broadcast(shift)
    match cell.variant_options.activation:
        case "relu":
            y = F.relu(y)
        case "leaky_relu":
            y = F.leaky_relu(y)
        case "silu":
            y = F.silu(y)
        case "gelu_tanh":
            y = F.gelu(y, approximate="tanh")
    if cell.variant_options.dropout:
        y = F.dropout(y, cell.variant_options.dropout)
    if cell.variant_options.out_dtype == FLOAT8:
        return _quantise(y)
    return y if residual is None else (y, h)


def _normalise(cell: KernelCell, h: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm of rows, of channels moved to the last axis and back, or of groups.

    GroupNorm with a group for each channel is torch's InstanceNorm.
    """
    if cell.is_over_channels:
        return _normalise_rows(cell, h.movedim(1, -1), weight, bias).movedim(-1, 1)
    if not cell.groups:
        return _normalise_rows(cell, h, weight, bias)
    if cell.groups == h.shape[1]:
        return F.instance_norm(h, weight=weight, bias=bias, eps=EPS)
    return F.group_norm(h, cell.groups, weight, bias, EPS)


def _normalise_rows(cell: KernelCell, h: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    size = h.shape[-1:]
    if cell.variant_options.per_head:
        assert weight is not None
        y = F.rms_norm(h, size, eps=EPS) if cell.op == "rms_norm" else F.layer_norm(h, size, eps=EPS)
        return y * weight if bias is None else y * weight + bias
    if cell.variant_options.norms > 1:
        assert weight is not None
        assert bias is not None
        for norm_weight, norm_bias in zip(weight.unbind(), bias.unbind(), strict=True):
            h = F.layer_norm(h, size, norm_weight, norm_bias, EPS)
        return h
    if cell.op == "rms_norm":
        return F.rms_norm(h, size, weight, EPS)
    return F.layer_norm(h, size, weight, bias, EPS)


def _quantise(y: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in float8, and the scale of each."""
    y = y.float()
    scale = (y.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(SMALLEST_SCALE)
    return (y / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale.squeeze(-1)


def make_eager_run(problem: BenchmarkProblem) -> ProviderRun:
    """`compute_plain` without compilation."""
    return _make_autograd_run(problem, lambda function: function)


def make_compiled_run(problem: BenchmarkProblem) -> ProviderRun:
    """`compute_plain` under torch.compile, for this shape only; no compiler processes remain while it is timed."""
    from torch._inductor import config

    config.compile_threads = 1
    torch.compiler.reset()
    return _make_autograd_run(problem, lambda function: torch.compile(function, dynamic=False))


def _compute_differentiated(
    cell: KernelCell,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    **of_samples: Tensor,
) -> Results:
    """The results of `compute_plain` whose gradients are given: y and, with a gate, the sum.

    A compiled graph that also returned another residual's sum would expect its gradient.
    """
    result = compute_plain(cell, x, weight, bias, residual, **of_samples)
    results = result if isinstance(result, tuple) else (result,)
    return results if cell.variant_options.has_gate else results[:1]


def _make_autograd_run(
    problem: BenchmarkProblem, prepare: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> ProviderRun:
    """The pass through autograd; the backward graph is kept, so that only the backward pass is timed."""
    cell = problem.cell
    if cell.pass_ == "forward":
        function = prepare(compute_plain)

        def forward() -> Results:
            with torch.no_grad():
                result = function(
                    cell, problem.x, problem.weight, problem.bias, problem.residual, **problem.sample_parameters
                )
            return result if isinstance(result, tuple) else (result,)

        return ProviderRun(
            forward, find_kept=(lambda results: results[0] != 0) if cell.variant_options.dropout else None
        )

    normalise = prepare(_compute_differentiated)

    def build_graph(tensors: dict[str, Tensor], residual: Tensor | None) -> tuple[Results, Results]:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        if residual is not None and cell.variant_options.has_own_dresidual(problem.x.dtype):
            residual = leaves["residual"] = residual.detach().requires_grad_()
        torch.manual_seed(SEED)
        of_samples = {name: leaves[name] for name in cell.variant_options.sample_roles}
        results = normalise(cell, leaves["x"], leaves.get("weight"), leaves.get("bias"), residual, **of_samples)
        return results, tuple(leaves.values())

    named = {"x": problem.x, "weight": problem.weight, "bias": problem.bias, **problem.sample_parameters}
    inputs = {name: tensor for name, tensor in named.items() if tensor is not None}
    results, leaves = build_graph(inputs, problem.residual)
    gradients = drop_none((problem.dy, problem.dresidual_out))
    mask = None
    if cell.variant_options.dropout:
        # With inputs of ones, y is 0 only where the mask makes it 0.
        ones = {name: torch.ones_like(tensor) for name, tensor in inputs.items()}
        residual = None if problem.residual is None else torch.ones_like(problem.residual)
        mask = build_graph(ones, residual)[0][0].detach() != 0
    return ProviderRun(
        lambda: torch.autograd.grad(results, leaves, gradients, retain_graph=True),
        find_kept=None if mask is None else lambda _: mask,
    )


def make_copy_run(problem: BenchmarkProblem) -> ProviderRun:
    """The upper bound: a copy of x."""
    target = torch.empty_like(problem.x)
    return ProviderRun(lambda: (target.copy_(problem.x),))
