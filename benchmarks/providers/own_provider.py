"""fusednorm as a provider; see `registry` for the contract."""

from typing import Any

import fusednorm

from benchmarks.workload.problems import EPS, SEED, BenchmarkProblem, ProviderRun, Results, drop_none


def make_own_run(problem: BenchmarkProblem) -> ProviderRun:
    """The launchers, without autograd."""
    cell = problem.cell
    if cell.variant_options.norms > 1:
        return _make_own_chain(problem)
    leading = (problem.x, cell.groups) if cell.groups else (problem.x,)
    parameters = (problem.weight,) if cell.op == "rms_norm" else (problem.weight, problem.bias)
    options: dict[str, Any] = {
        "eps": EPS,
        "residual": problem.residual,
        **cell.norm_options,
        **problem.sample_parameters,
    }
    if cell.variant_options.dropout:
        options |= {"dropout": cell.variant_options.dropout, "seed": SEED}
    forward = getattr(fusednorm, f"{cell.op}_forward")
    if cell.pass_ == "forward":
        if cell.variant_options.out_dtype is not None:
            options["out_dtype"] = cell.variant_options.out_dtype
        return ProviderRun(lambda: drop_none(forward(*leading, *parameters, **options)))
    backward = getattr(fusednorm, f"{cell.op}_backward")
    saved = forward(*leading, *parameters, stats=True, **options)
    dy, dresidual_out = problem.dy, problem.dresidual_out
    statistics = {"rstd": saved.rstd} if cell.op == "rms_norm" else {"mean": saved.mean, "rstd": saved.rstd}

    def compute_gradients() -> Results:
        result = backward(dy, *leading, *parameters, dresidual_out=dresidual_out, **statistics, **options)
        return problem.list_gradients(result)

    return ProviderRun(compute_gradients)


def _make_own_chain(problem: BenchmarkProblem) -> ProviderRun:
    assert problem.weight is not None
    assert problem.bias is not None
    x, weights, biases = problem.x, problem.weight.unbind(), problem.bias.unbind()
    return ProviderRun(lambda: (fusednorm.layer_norm_chain(x, weights, biases, eps=EPS),))
