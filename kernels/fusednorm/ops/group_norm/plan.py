"""From checked tensors to the launches of a GroupNorm pass: the one place that chooses an algorithm."""

from dataclasses import replace

from torch import Tensor

from fusednorm.checks import Epilogue
from fusednorm.device import multiprocessor_count
from fusednorm.launch.launch import Launch
from fusednorm.layouts import lies_otherwise
from fusednorm.ops.group_norm import backward_choice, forward_choice
from fusednorm.ops.group_norm.call import (
    BackwardCall,
    BackwardConfig,
    ForwardCall,
    ForwardConfig,
    empty_statistics,
)
from fusednorm.ops.group_norm.sample import Sample
from fusednorm.policy.waiting import may_wait
from fusednorm.results import Backward, Forward


def plan_forward(
    x: Tensor,
    sample: Sample,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    epilogue: Epilogue,
    out: Forward,
    config: ForwardConfig | None = None,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> list[Launch]:
    """The launches of a forward pass over checked tensors into `out`, workspaces allocated.

    `config` overrides the choice, for tests, benchmarks and compile checks.
    """
    call = ForwardCall(x, sample, weight, bias, eps, residual, scale, shift, epilogue, out)
    size = x.element_size()
    choices: tuple[ForwardConfig, ...]
    if config is not None:
        choices = (config,)
    elif lies_otherwise(residual, sample.channels_last):
        choices = (forward_choice.split_forward(sample, size),)
    else:
        choices = forward_choice.candidates(sample, size, multiprocessor_count(x.device), may_wait())
    fitting = (fits for choice in choices if (fits := choice.fitted(call)) is not None)
    config = next(fitting, None) or forward_choice.never_waiting(sample, size)
    return config.launches(call)


def plan_statistics(
    x: Tensor, sample: Sample, eps: float, residual: Tensor | None, mean: Tensor, rstd: Tensor
) -> list[Launch]:
    """The launches that fill mean and rstd alone, for a backward pass that needs them and came without."""
    config = forward_choice.split_forward(sample, x.element_size())
    return config.statistics(x, sample, eps, residual, mean, rstd)


def plan_backward(
    dy: Tensor,
    x: Tensor,
    sample: Sample,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
    residual: Tensor | None,
    dresidual_out: Tensor | None,
    epilogue: Epilogue,
    out: Backward,
    config: BackwardConfig | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> list[Launch]:
    """The launches of a backward pass over checked tensors into `out`, workspaces allocated.

    `config` overrides the choice, for tests, benchmarks and compile checks.
    """
    call = BackwardCall(
        dy, x, sample, weight, bias, eps, mean, rstd, residual, dresidual_out, epilogue, out, scale, shift
    )
    if config is None:
        if any(map(call.lies_otherwise, (dy, residual, dresidual_out))):
            config = backward_choice.split_backward(sample, x.element_size())
        else:
            multiprocessors = multiprocessor_count(x.device)
            config = backward_choice.choose_backward(sample, x.element_size(), multiprocessors, may_wait())
    if mean is not None or not config.takes_statistics:
        return config.launches(call)
    own_mean, own_rstd = empty_statistics(x, sample)
    before = plan_statistics(x, sample, eps, residual, own_mean, own_rstd)
    return [*before, *config.launches(replace(call, mean=own_mean, rstd=own_rstd))]
