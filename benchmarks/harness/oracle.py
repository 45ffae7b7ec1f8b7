"""The check of results: every element of every result against float64, before anything is timed."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from fusednorm import Forward, reference
from fusednorm.arguments.dropout import compute_dropout_threshold
from fusednorm.reference.chain import layer_norm_chain
from fusednorm.reference.dropout import compute_philox_words
from fusednorm.reference.float8 import quantise_rows
from fusednorm.tensors.arrays import FLOAT8
from torch import Tensor

from benchmarks.workload.problems import EPS, SEED, BenchmarkProblem, ProviderRun, Results, drop_none

_PART_NUMEL = 1 << 24

_ROUNDING = 8
"""Allowed error in units of x's dtype's epsilon, with room for a peer that rounds in between."""

_FLOAT8_ROUNDING = 2.0**-4
"""Relative rounding error: half a step of float8_e4m3fn's three bits."""

_FLOAT8_SUBNORMAL_ROUNDING = 2.0**-10
"""Rounding error of float8_e4m3fn's subnormals: half of their step."""


class WrongResultError(ValueError):
    """A provider's result is further from the exact one than rounding explains."""


class ResultOracle:
    """The exact results of a problem, computed once unless a provider draws its own dropout mask."""

    def __init__(self, problem: BenchmarkProblem) -> None:
        self._problem = problem
        self._exact: Results | None = None

    def measure_error(self, run: ProviderRun) -> float:
        """Largest absolute error of the first result, y or dx.

        Raises:
            WrongResultError: a result is missing or wrong.
        """
        if run.restore_inputs is not None:
            run.restore_inputs()
        results = run.call()
        exact = self._get_exact(run, results)
        if len(results) != len(exact):
            raise WrongResultError(f"{len(exact)} results expected, got {len(results)}")
        errors = [self._check_result(index, results, exact) for index in range(len(exact))]
        return errors[0]

    def _check_result(self, index: int, results: Results, exact_results: Results) -> float:
        """The largest error of one result, if rounding explains it."""
        actual, exact = results[index].double(), exact_results[index]
        quantisation: Tensor | float = 0.0
        if results[index].dtype == FLOAT8:
            actual *= results[-1].double().unsqueeze(-1)
            smallest = exact_results[-1].unsqueeze(-1) * _FLOAT8_SUBNORMAL_ROUNDING
            quantisation = torch.maximum(exact.abs() * _FLOAT8_ROUNDING, smallest)
        error = actual.sub_(exact).abs_()
        if index == 0 and self._corners is not None:
            error.masked_fill_(self._corners, 0.0)
        largest = float(error.max())
        beyond = float((error - quantisation).max())
        if not beyond <= self._compute_tolerance(index, exact):
            raise WrongResultError(f"result {index} is wrong by {largest:.3g}")
        return largest

    @cached_property
    def _corners(self) -> Tensor | None:
        """The elements of dx where rounding decides between two derivatives, those of relu on either side of 0."""
        cell = self._problem.cell
        if cell.pass_ == "forward" or cell.variant_options.activation not in ("relu", "leaky_relu"):
            return None
        x = self._problem.x
        z = torch.cat([_compute_norm(self._problem, part, activation="none").y for part in _split_rows(x)])
        return z.abs_() < _ROUNDING * torch.finfo(x.dtype).eps

    def _get_exact(self, run: ProviderRun, results: Results) -> Results:
        if run.find_kept is not None:
            keep = run.find_kept(results)
            self._check_dropout_rate(keep)
            return compute_exact_results(self._problem, keep)
        if self._exact is None:
            self._exact = compute_exact_results(self._problem)
        return self._exact

    def _check_dropout_rate(self, keep: Tensor) -> None:
        p = self._problem.cell.variant_options.dropout
        kept = float(keep.sum(dtype=torch.float64)) / keep.numel()
        if not abs(kept - (1 - p)) <= 6 * (p * (1 - p) / keep.numel()) ** 0.5:
            raise WrongResultError(f"dropout of {p} kept {kept:.4f}")

    def _compute_tolerance(self, index: int, exact: Tensor) -> float:
        """The allowed error of a result; a long float32 sum adds its own."""
        x, spec = self._problem.x, self._problem.cell.variant_options
        relative = _ROUNDING * torch.finfo(x.dtype).eps
        if self._problem.cell.pass_ == "backward" and index > 0:
            relative += torch.finfo(torch.float32).eps * (x.numel() / exact.numel()) ** 0.5
        is_scale = spec.out_dtype == FLOAT8 and index == 1
        return relative * max(0.0 if is_scale else 1.0, float(exact.abs().max()))


def compute_exact_results(problem: BenchmarkProblem, keep: Tensor | None = None) -> Results:
    """The results of `ProviderRun.call` in float64, in parts to limit the memory; a float8 y without rounding.

    Args:
        keep: the elements that dropout kept, bool like x; None for fusednorm's mask.
    """
    if problem.cell.pass_ == "forward":
        parts = [_compute_forward(problem, part, keep) for part in _split_rows(problem.x)]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))
    parts = [_compute_backward(problem, part, keep) for part in _split_rows(problem.x)]
    dx, *gradients = zip(*parts, strict=True)
    count = len(drop_none((problem.weight, problem.bias)))
    of_all = (torch.stack(gradient).sum(0) for gradient in gradients[:count])
    return (torch.cat(dx), *of_all, *map(torch.cat, gradients[count:]))


def _split_rows(x: Tensor) -> Iterator[slice]:
    """Slices of rows or samples, at least one each."""
    step = max(1, _PART_NUMEL // (x.numel() // x.shape[0]))
    return (slice(start, min(start + step, x.shape[0])) for start in range(0, x.shape[0], step))


def _compute_forward(problem: BenchmarkProblem, part: slice, keep: Tensor | None) -> Results:
    if problem.cell.variant_options.norms > 1:
        x, *parameters = _get_inputs(problem, part)
        return (layer_norm_chain(x, *parameters, eps=EPS, precision=torch.float64),)
    result = _compute_norm(problem, part)
    y = result.y
    if problem.cell.variant_options.dropout:
        y = y * _compute_dropout_factors(problem, part, keep)
    if problem.cell.variant_options.out_dtype == FLOAT8:
        return y, quantise_rows(y)[1]
    return drop_none((y, result.residual_out))


def _compute_norm(problem: BenchmarkProblem, part: slice, **options: Any) -> Forward:
    """The reference's forward pass, without dropout; `options` replace those of the problem."""
    forward = getattr(reference, f"{problem.cell.op}_forward")
    result: Forward = forward(*_get_inputs(problem, part), **{**_get_options(problem, part), **options})
    return result


def _compute_backward(problem: BenchmarkProblem, part: slice, keep: Tensor | None) -> Results:
    backward = getattr(reference, f"{problem.cell.op}_backward")
    dy = problem.dy[part].double()
    if problem.cell.variant_options.dropout:
        dy = dy * _compute_dropout_factors(problem, part, keep)
    dresidual_out = None if problem.dresidual_out is None else problem.dresidual_out[part].double()
    result = backward(dy, *_get_inputs(problem, part), dresidual_out=dresidual_out, **_get_options(problem, part))
    return problem.list_gradients(result)


def _get_inputs(problem: BenchmarkProblem, part: slice) -> tuple[Any, ...]:
    """x, the groups and the parameters in float64, so that results are not rounded."""
    groups = (problem.cell.groups,) if problem.cell.groups else ()
    parameters = (tensor.double() for tensor in drop_none((problem.weight, problem.bias)))
    return (problem.x[part].double(), *groups, *parameters)


def _get_options(problem: BenchmarkProblem, part: slice) -> dict[str, Any]:
    """Options without dropout: a part does not know the index of its first row, on which the mask depends."""
    residual = None if problem.residual is None else problem.residual[part].double()
    of_samples = {name: tensor[part].double() for name, tensor in problem.sample_parameters.items()}
    return {"eps": EPS, "residual": residual, **problem.cell.norm_options, **of_samples}


def _compute_dropout_factors(problem: BenchmarkProblem, part: slice, keep: Tensor | None) -> Tensor:
    p = problem.cell.variant_options.dropout
    kept = compute_keep_mask(problem.x, part, p) if keep is None else keep[part]
    return kept.double() / (1.0 - p)


def compute_keep_mask(x: Tensor, part: slice, p: float) -> Tensor:
    """The mask of fusednorm's dropout of x [rows, cols] with `SEED`, for the rows in `part`."""
    row = torch.arange(part.start, part.stop, device=x.device)[:, None]
    quad = torch.arange(-(-x.shape[1] // 4), device=x.device)[None, :]
    words = torch.stack(compute_philox_words(SEED, row, quad), dim=-1).flatten(1)
    return words[:, : x.shape[1]] >= compute_dropout_threshold(p)
