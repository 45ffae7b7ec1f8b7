"""Differentiable operators: `layer_norm`, `rms_norm`, `group_norm`, and the same after a residual addition.

Each is a pair of `torch.library` operators with fakes, `fusednorm::<op>` and `fusednorm::<op>_backward`, so that
torch.compile keeps them whole.  CUDA tensors go to the kernels, CPU tensors to `reference`, float64 included.
The functions and their operators stand in one file because they share one list of arguments.
"""

from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from fusednorm import group_norm_passes, layer_norm_passes, reference
from fusednorm.checks import FLOAT8
from fusednorm.errors import KernelInputError
from fusednorm.group_norm_checks import in_layout
from fusednorm.results import Backward, Forward

OPERATIONS = ("layer_norm", "rms_norm", "group_norm")

_FORWARD_SCHEMA = (
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, int num_groups, float eps, "
    "float weight_offset, str activation, float dropout, int seed) "
    "-> (Tensor y, Tensor mean, Tensor rstd, Tensor residual_out)"
)
_BACKWARD_SCHEMA = (
    "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, Tensor? residual, "
    "Tensor? dresidual_out, int num_groups, float eps, float weight_offset, str activation, float dropout, "
    "int seed) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dresidual)"
)


class Added(NamedTuple):
    """Result of a norm after a residual addition.

    Attributes:
        y: the normalised sum.
        residual_out: x + residual, in the residual's dtype; after a group norm, in x's.
    """

    y: Tensor
    residual_out: Tensor


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """`layer_norm_forward`'s y, differentiable in x, weight and bias."""
    return _apply("layer_norm", x, weight, bias, None, 0, eps, weight_offset, activation, dropout, seed)[0]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """`rms_norm_forward`'s y, differentiable in x and weight."""
    return _apply("rms_norm", x, weight, None, None, 0, eps, weight_offset, activation, dropout, seed)[0]


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    """`group_norm_forward`'s y, differentiable in x, weight and bias."""
    return _apply("group_norm", x, weight, bias, None, num_groups, eps, 0.0, activation, dropout, seed)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Added:
    """`layer_norm` of x + residual, with the sum; differentiable in all four tensors."""
    return Added(*_apply("layer_norm", x, weight, bias, residual, 0, eps, weight_offset, activation, dropout, seed))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Added:
    """`rms_norm` of x + residual, with the sum; differentiable in all three tensors."""
    return Added(*_apply("rms_norm", x, weight, None, residual, 0, eps, weight_offset, activation, dropout, seed))


def add_group_norm(
    x: Tensor,
    residual: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str = "none",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Added:
    """`group_norm` of x + residual, with the sum; differentiable in all four tensors."""
    return Added(*_apply("group_norm", x, weight, bias, residual, num_groups, eps, 0.0, activation, dropout, seed))


def _apply(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    num_groups: int,
    eps: float,
    weight_offset: float,
    activation: str,
    dropout: float,
    seed: int | None,
) -> tuple[Tensor, Any]:
    if x.dtype == FLOAT8:
        raise KernelInputError(f"x must be float32, float16, bfloat16 or float64, got {x.dtype}")
    if dropout and seed is None:
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
    if _is_unobserved(x, weight, bias, residual):
        result: Forward = getattr(_library(op, x), f"{op}_forward")(
            *_leading(op, x, num_groups),
            *_parameters(op, weight, bias),
            eps=eps,
            **_offset(op, weight_offset),
            residual=residual,
            activation=activation,
            dropout=dropout,
            seed=seed,
        )
        return result.y, result.residual_out
    operator = getattr(torch.ops.fusednorm, op)
    y, _, _, residual_out = operator(
        x, weight, bias, residual, num_groups, eps, weight_offset, activation, dropout, seed or 0
    )
    return y, residual_out


def _is_unobserved(*tensors: Tensor | None) -> bool:
    """Whether nobody differentiates, traces or transforms the call: then an operator would only cost time."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
        or torch._C._get_tracing_state()
    ):
        return False
    differentiates = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            return False
        if (differentiates and tensor.requires_grad) or not (tensor.is_cuda or tensor.is_cpu):
            return False
    return True


def _library(op: str, x: Tensor) -> Any:
    """The module that computes `op` where x is."""
    if x.device.type == "cpu":
        return reference
    return group_norm_passes if op == "group_norm" else layer_norm_passes


def _leading(op: str, x: Tensor, num_groups: int) -> tuple[Any, ...]:
    return (x, num_groups) if op == "group_norm" else (x,)


def _parameters(op: str, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    return (weight,) if op == "rms_norm" else (weight, bias)


def _offset(op: str, weight_offset: float) -> dict[str, float]:
    return {} if op == "group_norm" else {"weight_offset": weight_offset}


def _has_own_gradient(residual: Tensor | None, op: str, x: Tensor) -> TypeGuard[Tensor]:
    """Whether the residual's gradient is a tensor of its own, and not dx."""
    return residual is not None and residual.dtype != x.dtype and op != "group_norm"


def _absent(x: Tensor) -> Tensor:
    """What an operator returns for a result that was not asked for: it cannot return None."""
    return x.new_empty(0)


def _define(library: torch.library.Library, op: str) -> None:
    """Define `op` and its backward with their kernels, fakes and derivative."""

    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        num_groups: int,
        eps: float,
        weight_offset: float,
        activation: str,
        dropout: float,
        seed: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = getattr(_library(op, x), f"{op}_forward")
        result: Forward = run(
            *_leading(op, x, num_groups),
            *_parameters(op, weight, bias),
            eps=eps,
            **_offset(op, weight_offset),
            residual=residual,
            activation=activation,
            dropout=dropout,
            seed=seed,
            stats=True,
        )
        assert result.rstd is not None
        mean, residual_out = (_absent(x) if t is None else t for t in (result.mean, result.residual_out))
        return result.y, mean, result.rstd, residual_out

    def backward(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        residual: Tensor | None,
        dresidual_out: Tensor | None,
        num_groups: int,
        eps: float,
        weight_offset: float,
        activation: str,
        dropout: float,
        seed: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = getattr(_library(op, x), f"{op}_backward")
        statistics = {"rstd": rstd} if op == "rms_norm" else {"mean": mean, "rstd": rstd}
        result: Backward = run(
            dy,
            *_leading(op, x, num_groups),
            *_parameters(op, weight, bias),
            eps=eps,
            **_offset(op, weight_offset),
            residual=residual,
            dresidual_out=dresidual_out,
            activation=activation,
            dropout=dropout,
            seed=seed,
            **statistics,
        )
        dresidual = result.dresidual if _has_own_gradient(residual, op, x) else None
        dweight, dbias, dresidual = (
            _absent(x) if t is None else t for t in (result.dweight, result.dbias, dresidual)
        )
        return result.dx, dweight, dbias, dresidual

    def fake_forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, num_groups: int, *_: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        statistics_shape = (x.shape[0], num_groups) if op == "group_norm" else x.shape[:-1]
        statistics_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        rstd = x.new_empty(statistics_shape, dtype=statistics_dtype)
        mean = _absent(x) if op == "rms_norm" else torch.empty_like(rstd)
        residual_out = _absent(x) if residual is None else _like(op, x if op == "group_norm" else residual)
        return _like(op, x), mean, rstd, residual_out

    def fake_backward(
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        residual: Tensor | None,
        *_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dweight, dbias = (_absent(x) if p is None else torch.empty_like(p) for p in (weight, bias))
        dresidual = _like(op, residual) if _has_own_gradient(residual, op, x) else _absent(x)
        return _like(op, x), dweight, dbias, dresidual

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, residual, *ctx.settings = inputs
        _, mean, rstd, _ = output
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, residual, None if op == "rms_norm" else mean, rstd)

    def differentiate(
        ctx: Any, dy: Tensor | None, dmean: None, drstd: None, dresidual_out: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, weight, bias, residual, mean, rstd = ctx.saved_tensors
        dy = torch.zeros_like(x) if dy is None else _laid_out_as(op, x, dy)
        dsum = None if dresidual_out is None or residual is None else _laid_out_as(op, x, dresidual_out)
        dx, dweight, dbias, dresidual = getattr(torch.ops.fusednorm, f"{op}_backward")(
            dy,
            x,
            weight,
            bias,
            mean,
            rstd,
            residual,
            dsum,
            *ctx.settings,
        )
        if not _has_own_gradient(residual, op, x):
            dresidual = None if residual is None else dx.to(residual.dtype)
        return (
            dx,
            None if weight is None else dweight,
            None if bias is None else dbias,
            dresidual,
            *(None for _ in ctx.settings),
        )

    for name, schema, kernel, fake in (
        (op, _FORWARD_SCHEMA, forward, fake_forward),
        (f"{op}_backward", _BACKWARD_SCHEMA, backward, fake_backward),
    ):
        library.define(name + schema)
        library.impl(name, kernel, "CPU")
        library.impl(name, kernel, "CUDA")
        torch.library.register_fake(f"fusednorm::{name}", fake, lib=library)
    torch.library.register_autograd(f"fusednorm::{op}", differentiate, setup_context=remember, lib=library)


def _like(op: str, x: Tensor) -> Tensor:
    return torch.empty_like(x) if op == "group_norm" else x.new_empty(x.shape)


def _laid_out_as(op: str, x: Tensor, gradient: Tensor) -> Tensor:
    """A gradient as the kernels take it; autograd may hand over an expanded or permuted one, which costs a copy."""
    if op == "group_norm":
        walkable = in_layout(gradient, False) or in_layout(gradient, True)
        return gradient if walkable else torch.empty_like(x).copy_(gradient)
    return gradient.contiguous()


_LIBRARY = torch.library.Library("fusednorm", "DEF")
for _op in OPERATIONS:
    _define(_LIBRARY, _op)
