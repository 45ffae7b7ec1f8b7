"""LayerNorm and RMSNorm with a scale, shift or gate for each sample, by the norms without them.

y = dropout(act(z * (1 + scale) + shift)), where z is the norm of residual + gate * x, in float32.  The backward
pass computes z again.  With dropout, float64 or invalid arguments `fusednorm.reference` computes the call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm import reference
from fusednorm.arguments.checks import DEFAULT_SLOPE, count_samples, has_heads
from fusednorm.cpu.epilogue import activate_, backpropagate_activation_into_z_
from fusednorm.cpu.supported_arguments import has_float_tensors, is_valid_activation, is_zero_dropout
from fusednorm.errors import KernelInputError
from fusednorm.results import Backward, Forward

Norm = Callable[..., Any]
"""A pass of `fusednorm.reference` without the tensors of samples."""

Modulations = dict[str, Tensor]
"""The scale, shift and gate of a call, those that it has."""


def compute_forward(
    norm: Norm, op: str, modulations: Modulations, x: Tensor, stats: bool, **arguments: Any
) -> Forward:
    """Compute the forward pass of an operation; `norm` is its forward pass, `arguments` its other ones by name."""
    samples = _count_samples(x, modulations, arguments)
    if not samples:
        computed: Forward = getattr(reference, f"{op}_forward")(x=x, stats=stats, **modulations, **arguments)
        return computed
    gated = _multiply_by_gate(x.float(), modulations, samples)
    result: Forward = norm(x=gated, stats=stats, **arguments | _NO_ACTIVATION)
    z = _modulate_(result.y.view(samples, -1, x.shape[-1]), modulations)
    activate_(z, arguments["activation"], arguments["negative_slope"])
    return result._replace(y=result.y.to(x.dtype))


def compute_backward(
    forward: Norm, backward: Norm, op: str, modulations: Modulations, dy: Tensor, x: Tensor, **arguments: Any
) -> Backward:
    """Compute the backward pass of an operation; `forward` and `backward` are its passes."""
    samples = _count_samples(x, modulations, arguments)
    if not samples or not has_float_tensors(x.shape, dy):
        computed: Backward = getattr(reference, f"{op}_backward")(dy=dy, x=x, **modulations, **arguments)
        return computed
    activation, negative_slope = arguments["activation"], arguments["negative_slope"]
    arguments |= _NO_ACTIVATION
    given = {name: arguments[name] for name in _FORWARD_ARGUMENTS if name in arguments}
    gated = _multiply_by_gate(x.float(), modulations, samples)
    z = forward(x=gated, **given).y.view(samples, -1, x.shape[-1])
    dz = dy.reshape(z.shape).float()
    if activation != "none":
        modulated = _modulate_(z.clone(), modulations)
        dz = backpropagate_activation_into_z_(dz.contiguous(), modulated, activation, negative_slope)
    gradients: dict[str, Tensor] = {}
    if "shift" in modulations:
        gradients["dshift"] = _sum_samples(dz, modulations["shift"])
    if "scale" in modulations:
        gradients["dscale"] = _sum_samples(dz * z, modulations["scale"])
        dz = dz * _compute_factors(modulations["scale"], samples)
    if "gate" not in modulations:
        result: Backward = backward(dy=dz.view(dy.shape), x=x, **arguments)
        return result._replace(**gradients)
    result = backward(dy=dz.view(dy.shape), x=gated, **arguments)
    # Of the residual's sum, in float32 as gated is.
    dh = result.dx.view(z.shape)
    gradients["dgate"] = _sum_samples(dh * x.reshape(z.shape), modulations["gate"])
    gradients["dx"] = _multiply_by_gate(result.dx, modulations, samples).to(x.dtype)
    gradients["dresidual"] = result.dx.to(arguments["residual"].dtype)
    return result._replace(**gradients)


_FORWARD_ARGUMENTS = ("weight", "bias", "eps", "weight_offset", "residual", "activation", "negative_slope")
_NO_ACTIVATION = {"activation": "none", "negative_slope": DEFAULT_SLOPE}


def _count_samples(x: Tensor, modulations: Modulations, arguments: dict[str, Any]) -> int:
    """Count the samples of a valid call; 0 if the reference must compute the call or refuse it."""
    if not all(has_float_tensors(each.shape, each) for each in modulations.values()):
        return 0
    if not (is_zero_dropout(arguments["dropout"]) and has_float_tensors(x.shape, x) and x.numel()):
        return 0
    if not is_valid_activation(arguments["activation"], arguments["negative_slope"]):
        return 0
    if has_heads(arguments["weight"], arguments.get("bias")):
        return 0
    if "gate" in modulations and not _has_float_residual(x, arguments["residual"]):
        return 0
    try:
        return count_samples(tuple(x.shape), modulations)
    except KernelInputError:
        return 0


def _has_float_residual(x: Tensor, residual: Tensor | None) -> bool:
    return residual is not None and has_float_tensors(x.shape, residual)


def _multiply_by_gate(x: Tensor, modulations: Modulations, samples: int) -> Tensor:
    """Compute gate * x in float32; x without a gate."""
    if "gate" not in modulations:
        return x
    gate = modulations["gate"].float().reshape(samples, 1, -1)
    # Not a view, which torch does not change in place if it is the result of an autograd function.
    product = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    torch.mul(x.reshape(samples, -1, x.shape[-1]), gate, out=product.view(samples, -1, x.shape[-1]))
    return product


def _compute_factors(scale: Tensor, samples: int) -> Tensor:
    """Compute the factors 1 + scale, [samples, 1, cols] float32."""
    return scale.float().reshape(samples, 1, -1) + 1.0


def _modulate_(z: Tensor, modulations: Modulations) -> Tensor:
    """Compute z * (1 + scale) + shift in z's memory, [samples, tokens, cols] float32."""
    if "scale" in modulations:
        z.mul_(_compute_factors(modulations["scale"], z.shape[0]))
    if "shift" in modulations:
        z.add_(modulations["shift"].float().reshape(z.shape[0], 1, -1))
    return z


def _sum_samples(terms: Tensor, modulation: Tensor) -> Tensor:
    """Sum [samples, tokens, cols] over the tokens, in the shape and dtype of a tensor of samples."""
    return terms.sum(1).resize_(modulation.shape).to(modulation.dtype)
