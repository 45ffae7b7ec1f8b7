"""The calls of each provider, with prepared arguments, so that little but the call itself is timed."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import fusednorm
import torch
import torch.nn.functional as F  # noqa: N812
from fusednorm.launch import replay_cache
from torch import Tensor, nn

from benchmarks.host.cells import FORWARD_BACKWARD
from benchmarks.providers import library_providers
from benchmarks.workload.benchmark_cells import KernelCell
from benchmarks.workload.problems import EPS, BenchmarkProblem, Results

PROVIDERS = ("torch", "fusednorm", "fusednorm_python", "fusednorm_planned", "liger")
"""Known calls are repeated by the host extension, by Python (`_python`), or planned each time (`_planned`)."""


@dataclass(frozen=True, slots=True)
class HostCall:
    """One call.

    Attributes:
        call: the timed function.
        select_results: selects from its return value y alone, or the gradients of x, weight and bias.
    """

    call: Callable[[], Any]
    select_results: Callable[[Any], Results]


def make_call(provider: str, problem: BenchmarkProblem) -> HostCall | None:
    """A provider's call for a problem; None if it has none."""
    if problem.cell.pass_ == FORWARD_BACKWARD:
        return _make_module_call(provider, problem)
    if provider == "liger":
        return _make_liger_call(problem)
    functions = _make_torch_function if provider == "torch" else _make_own_function
    count = 1 if problem.cell.pass_ == "forward" else 2 + (problem.bias is not None)
    return HostCall(functions(problem), lambda returned: tuple(returned)[:count])


def _list_parameters(problem: BenchmarkProblem) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in (problem.weight, problem.bias) if tensor is not None)


def _make_own_function(problem: BenchmarkProblem) -> Callable[[], Any]:
    cell = problem.cell
    arguments = (problem.x, *((cell.groups,) if cell.groups else ()), *_list_parameters(problem))
    forward = partial(getattr(fusednorm, f"{cell.op}_forward"), *arguments, eps=EPS, stats=True)
    if cell.pass_ == "forward":
        return forward
    saved = forward()
    statistics = {"rstd": saved.rstd} if cell.op == "rms_norm" else {"mean": saved.mean, "rstd": saved.rstd}
    return partial(getattr(fusednorm, f"{cell.op}_backward"), problem.dy, *arguments, eps=EPS, **statistics)


def _make_torch_function(problem: BenchmarkProblem) -> Callable[[], Any]:
    """The operators that autograd calls; those of GroupNorm need contiguous tensors, which are made in advance."""
    cell, aten = problem.cell, torch.ops.aten
    native: Any = torch
    x, dy, parameters = problem.x.contiguous(), problem.dy.contiguous(), _list_parameters(problem)
    weight, wanted = parameters[0], [True] * (1 + len(parameters))
    if cell.op == "group_norm":
        n, c, *spatial = cell.shape
        sizes = (n, c, torch.Size(spatial).numel(), cell.groups)
        forward: Callable[[], Any] = partial(native.native_group_norm, x, *parameters, *sizes, EPS)
        backward: Callable[..., Any] = partial(
            aten.native_group_norm_backward.default, dy, x, *forward()[1:], weight, *sizes, wanted
        )
    elif cell.op == "layer_norm":
        size = [cell.shape[-1]]
        forward = partial(native.native_layer_norm, x, size, *parameters, EPS)
        backward = partial(
            aten.native_layer_norm_backward.default, dy, x, size, *forward()[1:], *parameters, wanted
        )
    else:
        size = [cell.shape[-1]]
        forward = partial(aten._fused_rms_norm.default, x, size, weight, EPS)
        backward = partial(aten._fused_rms_norm_backward.default, dy, x, size, forward()[1], weight, wanted)
    return forward if cell.pass_ == "forward" else backward


def _make_liger_call(problem: BenchmarkProblem) -> HostCall | None:
    run = library_providers.make_liger_run(problem)
    if run is None:
        return None
    if run.restore_inputs is not None:
        run.restore_inputs()
    return HostCall(run.call, lambda returned: returned)


def _make_module_call(provider: str, problem: BenchmarkProblem) -> HostCall | None:
    module = _make_module(provider, problem)
    if module is None:
        return None
    x = problem.x.clone().requires_grad_()
    dy = problem.dy.clone()  # Liger's RMSNorm overwrites it with its gradient.
    parameters = list(module.parameters())
    forward: Callable[[Tensor], Tensor] = module
    if provider == "torch" and problem.cell.variant_options.activation == "silu":
        silu = F.silu

        def forward(x: Tensor) -> Tensor:
            return silu(module(x))

    def run_step() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        forward(x).backward(dy)

    def get_gradients(_: Any) -> Results:
        return tuple(tensor.grad for tensor in (x, *parameters) if tensor.grad is not None)

    return HostCall(run_step, get_gradients)


def _make_module(provider: str, problem: BenchmarkProblem) -> nn.Module | None:
    """The provider's module with the problem's parameters, if it has one."""
    cell = problem.cell
    if provider == "liger":
        if cell.op == "group_norm":
            return None
        module = _make_liger_module(cell.op, cell.shape[-1])
    else:
        module = _make_torch_module(cell) if provider == "torch" else _make_own_module(cell)
    for name, tensor in (("weight", problem.weight), ("bias", problem.bias)):
        if tensor is not None:
            setattr(module, name, nn.Parameter(tensor.clone()))
    return module


def _make_torch_module(cell: KernelCell) -> nn.Module:
    if cell.op == "group_norm":
        return nn.GroupNorm(cell.groups, cell.shape[1], EPS)
    return (nn.LayerNorm if cell.op == "layer_norm" else nn.RMSNorm)(cell.shape[-1], EPS)


def _make_own_module(cell: KernelCell) -> nn.Module:
    if cell.op == "group_norm":
        return fusednorm.GroupNorm(cell.groups, cell.shape[1], EPS, activation=cell.variant_options.activation)
    return (fusednorm.LayerNorm if cell.op == "layer_norm" else fusednorm.RMSNorm)(cell.shape[-1], EPS)


def _make_liger_module(op: str, size: int) -> nn.Module:
    from liger_kernel.transformers.layer_norm import LigerLayerNorm
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    module: nn.Module = LigerLayerNorm(size, EPS, bias=True) if op == "layer_norm" else LigerRMSNorm(size, EPS)
    return module


class MissingExtensionError(RuntimeError):
    """A call to be timed with the host extension does not have it."""


def select_settings(provider: str) -> AbstractContextManager[object]:
    """The context in which a provider's calls are made and timed."""
    if provider == "fusednorm":
        return _use_extension()
    if provider == "fusednorm_planned":
        return _disable_replays()
    return _disable_extension() if provider == "fusednorm_python" else nullcontext()


@contextmanager
def _use_extension() -> Any:
    """
    Raises:
        MissingExtensionError: it cannot be compiled or loaded.
    """
    _load_extension()
    if replay_cache.get_extension() is None:
        raise MissingExtensionError("no host extension: python -m fusednorm.host compiles it, or says why not")
    yield


@contextmanager
def _disable_extension() -> Any:
    _load_extension()
    extension = replay_cache.get_extension()
    replay_cache.set_extension(None)
    try:
        yield
    finally:
        replay_cache.set_extension(extension)


@contextmanager
def _disable_replays() -> Any:
    """Each call is checked and planned."""
    again = patch.object(replay_cache.ReplayablePass, "try_replay", lambda *_: None)
    with _disable_extension(), again, patch.object(replay_cache.ReplayablePass, "record", lambda *_: None):
        yield


def _load_extension() -> None:
    """Load the extension, if there is one, by a first launch."""
    if torch.cuda.is_available() and replay_cache.get_extension() is None:
        fusednorm.layer_norm_forward(torch.zeros(1, 16, device="cuda"), eps=EPS)
