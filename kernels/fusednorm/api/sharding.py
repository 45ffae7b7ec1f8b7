"""Sharding of the operators over DTensors: replicated, or with separate rows, heads or samples on each rank."""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fusednorm.arguments.checks import select_modulations
from fusednorm.arguments.inputs import OPERATIONS, ROLES, BackwardInputs, NormInputs, ShapeRole
from fusednorm.arguments.operator_arguments import list_operator_arguments, parse_operator_arguments
from fusednorm.arguments.options import NormOptions

_is_registered = False


def try_register_shardings() -> None:
    """Register the operators' DTensor placements with torch, once, if the program has imported DTensors."""
    global _is_registered
    # Importing this part of torch takes seconds, so only a program that uses it shall wait for it.
    if _is_registered or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.experimental import register_sharding

    for op in OPERATIONS:
        register_sharding(getattr(torch.ops.fusednorm, op).default)(_list_forward_placements)
        register_sharding(getattr(torch.ops.fusednorm, f"{op}_backward").default)(_list_backward_placements)
    _is_registered = True


# As `torch.compiler.assume_constant_result` marks it, which imports the compiler: it is called while torch traces.
try_register_shardings._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _list_forward_placements(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """List the DTensor placements that a forward operator supports along one dimension of a mesh.

    Each entry is one way to divide the work: the placements of the results, and those of the arguments.
    Those of options are None.
    """
    inputs, options = parse_operator_arguments(NormInputs, "", arguments)
    of_options = (None,) * len(options.operator_arguments)
    found = []
    for split in _list_shardings(inputs, options):
        residual_out = split.replicated if inputs.residual is None else split.x_placement
        results = [split.x_placement, split.x_placement, split.x_placement, residual_out]
        placed: NormInputs[Any] = NormInputs._make(split.list_placements(inputs))
        found.append((results, list(list_operator_arguments(placed, of_options))))
    return found


def _list_backward_placements(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """List the DTensor placements that a backward operator supports along one dimension of a mesh.

    Each entry is one way to divide the work: the placements of the results, and those of the arguments.
    Those of options are None.
    """
    inputs, options = parse_operator_arguments(BackwardInputs, "", arguments)
    of_options = (None,) * len(options.operator_arguments)
    found = []
    for split in _list_shardings(inputs.forward_inputs, options):
        of_gradients = split._replace(parameter_placement=split.gradient_placement).list_placements(
            inputs.forward_inputs
        )
        gradients = [split.replicated if placement is None else placement for placement in of_gradients]
        placed: BackwardInputs[Any] = BackwardInputs._make(split.list_placements(inputs))
        found.append((gradients, list(list_operator_arguments(placed, of_options))))
    return found


class _ShardingPlacements(NamedTuple):
    """One way to divide the work over ranks: the DTensor placement of each sort of tensor.

    Attributes:
        replicated: the placement of a tensor that each rank has undivided.
        x_placement: of x, and of every other tensor that is not a parameter.
        parameter_placement, gradient_placement: of parameters, and of their gradients.
        samples_are_split: whether tensors of each sample are divided as x is; else they are placed as parameters.
    """

    replicated: Any
    x_placement: Any
    parameter_placement: Any
    gradient_placement: Any
    samples_are_split: bool = True

    def list_placements(self, inputs: NormInputs | BackwardInputs) -> list[Any]:
        """List the placement of each input; None for an absent one."""
        as_parameters = (
            {ShapeRole.PARAMETER} if self.samples_are_split else {ShapeRole.PARAMETER, ShapeRole.PER_SAMPLE}
        )
        return [
            None
            if tensor is None
            else self.parameter_placement
            if ROLES[name] in as_parameters
            else self.x_placement
            for name, tensor in zip(inputs._fields, inputs, strict=True)
        ]


def _list_shardings(inputs: NormInputs, options: NormOptions) -> Iterator[_ShardingPlacements]:
    """Yield the ways to divide an operation's work over ranks: undivided, or by samples, rows or heads.

    With dropout the work stays undivided, since the mask counts the rows of the undivided tensor.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    replicated = Replicate()
    yield _ShardingPlacements(replicated, replicated, replicated, replicated)
    # The dropout mask counts the rows of the undivided tensor.
    if options.dropout:
        return
    has_heads = any(tensor is not None and tensor.ndim == 2 for tensor in (inputs.weight, inputs.bias))
    # Rows of an operation without groups: num_groups is 0.
    axes: int = inputs.x.ndim
    last = 1 if options.num_groups or options.layout else axes - 2 if has_heads else axes - 1
    modulations = select_modulations(inputs.scale, inputs.shift, inputs.gate).values()
    for axis in range(last):
        of_axis = [each.ndim > axis + 1 and each.shape[axis] == inputs.x.shape[axis] for each in modulations]
        if len(set(of_axis)) < 2:
            yield _ShardingPlacements(replicated, Shard(axis), replicated, Partial(), all(of_axis))
    if has_heads:
        yield _ShardingPlacements(replicated, Shard(last), Shard(0), Shard(0))
