"""fusednorm as a provider; see `registry` for the contract."""

from typing import Any

import fusednorm

from benchmarks.workload.problem import EPS, SEED, Problem, Results, Run, present


def ours(problem: Problem) -> Run:
    """The launchers, without autograd."""
    cell = problem.cell
    if cell.spec.norms > 1:
        return _our_chain(problem)
    leading = (problem.x, cell.groups) if cell.groups else (problem.x,)
    parameters = (problem.weight,) if cell.op == "rms_norm" else (problem.weight, problem.bias)
    options: dict[str, Any] = {
        "eps": EPS,
        "activation": cell.spec.activation,
        "residual": problem.residual,
        **problem.of_samples,
    }
    if cell.spec.dropout:
        options |= {"dropout": cell.spec.dropout, "seed": SEED}
    forward = getattr(fusednorm, f"{cell.op}_forward")
    if cell.pass_ == "forward":
        if cell.spec.out_dtype is not None:
            options["out_dtype"] = cell.spec.out_dtype
        return Run(lambda: present(forward(*leading, *parameters, **options)))
    backward = getattr(fusednorm, f"{cell.op}_backward")
    saved = forward(*leading, *parameters, stats=True, **options)
    statistics = {"rstd": saved.rstd} if cell.op == "rms_norm" else {"mean": saved.mean, "rstd": saved.rstd}
    has_dresidual = cell.spec.has_dresidual(problem.x.dtype)

    def gradients() -> Results:
        result = backward(problem.dy, *leading, *parameters, **statistics, **options)
        dresidual = result.dresidual if has_dresidual else None
        return present((result.dx, result.dweight, result.dbias, result.dscale, result.dshift, dresidual))

    return Run(gradients)


def _our_chain(problem: Problem) -> Run:
    assert problem.weight is not None
    assert problem.bias is not None
    x, weights, biases = problem.x, problem.weight.unbind(), problem.bias.unbind()
    return Run(lambda: (fusednorm.layer_norm_chain(x, weights, biases, eps=EPS),))
