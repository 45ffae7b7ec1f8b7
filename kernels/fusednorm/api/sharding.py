"""How the operators compute DTensors: replicated, or with each rank's own rows, heads or samples."""

import sys
from collections.abc import Iterator
from typing import Any

import torch

_is_registered = False


def register_shardings() -> None:
    """Register the placements that the operators support with torch, once, if there may be DTensors."""
    global _is_registered
    # Importing this part of torch takes seconds, so only a program that uses it shall wait for it.
    if _is_registered or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.experimental import register_sharding

    for op in ("layer_norm", "rms_norm", "group_norm"):
        register_sharding(getattr(torch.ops.fusednorm, op).default)(_forward_placements)
        register_sharding(getattr(torch.ops.fusednorm, f"{op}_backward").default)(_backward_placements)
    _is_registered = True


# As `torch.compiler.assume_constant_result` marks it, which imports the compiler: it is called while torch traces.
register_shardings._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _forward_placements(
    x: Any, weight: Any, bias: Any, residual: Any, scale: Any, shift: Any, num_groups: int, *settings: Any
) -> list[tuple[list[Any], list[Any]]]:
    """Pairs of the placements of results and arguments along one dimension of a mesh."""
    *_, dropout, _ = settings
    found = []
    for whole, of_x, of_parameter, _ in _splits(x, weight, bias, num_groups, dropout):
        results = [of_x, of_x, of_x, whole if residual is None else of_x]
        parameters = [_of(tensor, of_parameter) for tensor in (weight, bias)]
        others = [_of(tensor, of_x) for tensor in (residual, scale, shift)]
        found.append((results, [of_x, *parameters, *others, None, *(None for _ in settings)]))
    return found


def _backward_placements(
    dy: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    rstd: Any,
    residual: Any,
    scale: Any,
    shift: Any,
    dresidual_out: Any,
    num_groups: int,
    *settings: Any,
) -> list[tuple[list[Any], list[Any]]]:
    """Pairs of the placements of gradients and arguments along one dimension of a mesh."""
    *_, dropout, _ = settings
    found = []
    for whole, of_x, of_parameter, of_gradient in _splits(x, weight, bias, num_groups, dropout):
        gradients = [whole if tensor is None else of_gradient for tensor in (weight, bias)]
        others = [whole if tensor is None else of_x for tensor in (residual, scale, shift)]
        parameters = [_of(tensor, of_parameter) for tensor in (weight, bias)]
        more = [_of(tensor, of_x) for tensor in (mean, rstd, residual, scale, shift, dresidual_out)]
        arguments = [of_x, of_x, *parameters, *more, None, *(None for _ in settings)]
        found.append(([of_x, *gradients, *others], arguments))
    return found


def _splits(x: Any, weight: Any, bias: Any, num_groups: int, dropout: float) -> Iterator[tuple[Any, Any, Any, Any]]:
    """For each way to divide the work: the placements of a whole tensor, x, parameters and their gradients."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole = Replicate()
    yield whole, whole, whole, whole
    # Dropout's mask counts the rows of the whole tensor.
    if dropout:
        return
    has_heads = any(tensor is not None and tensor.ndim == 2 for tensor in (weight, bias))
    # Rows of an operation without groups: num_groups is 0.
    last = 1 if num_groups else x.ndim - 2 if has_heads else x.ndim - 1
    for axis in range(last):
        yield whole, Shard(axis), whole, Partial()
    if has_heads:
        yield whole, Shard(last), Shard(0), Shard(0)


def _of(tensor: Any, placement: Any) -> Any:
    """The placement of an argument, None for an absent one."""
    return None if tensor is None else placement
