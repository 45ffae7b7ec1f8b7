"""LayerNorm and RMSNorm with a scale and a shift for each sample, by the norms without them.

y = dropout(act(z * (1 + scale) + shift)), where z is the norm without scale and shift, in float32.  The backward
pass computes z again.  With dropout, float64 or invalid arguments `fusednorm.reference` computes the call.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fusednorm import reference
from fusednorm.arguments.checks import count_samples
from fusednorm.cpu.epilogue import activate_, backpropagate_activation_into_z_
from fusednorm.cpu.supported_arguments import has_float_tensors, is_zero_dropout
from fusednorm.errors import KernelInputError
from fusednorm.results import Backward, Forward

Norm = Callable[..., Any]
"""A pass of `fusednorm.reference` without scale and shift."""


def compute_forward(
    norm: Norm, op: str, scale: Tensor | None, shift: Tensor | None, x: Tensor, stats: bool, **arguments: Any
) -> Forward:
    """Compute the forward pass of an operation; `norm` is its forward pass, `arguments` its other ones by name."""
    samples = _count_samples(x, scale, shift, arguments)
    if not samples:
        computed: Forward = getattr(reference, f"{op}_forward")(
            x=x, scale=scale, shift=shift, stats=stats, **arguments
        )
        return computed
    result: Forward = norm(x=x.float(), stats=stats, **arguments | {"activation": "none"})
    z = _modulate_(result.y.view(samples, -1, x.shape[-1]), scale, shift)
    activate_(z, arguments["activation"])
    return result._replace(y=result.y.to(x.dtype))


def compute_backward(
    forward: Norm, backward: Norm, op: str, scale: Tensor | None, shift: Tensor | None, dy: Tensor, x: Tensor,
    **arguments: Any,
) -> Backward:  # fmt: skip
    """Compute the backward pass of an operation; `forward` and `backward` are its passes."""
    samples = _count_samples(x, scale, shift, arguments)
    if not samples or not has_float_tensors(x.shape, dy):
        computed: Backward = getattr(reference, f"{op}_backward")(dy=dy, x=x, scale=scale, shift=shift, **arguments)
        return computed
    activation = arguments["activation"]
    arguments["activation"] = "none"
    given = {name: arguments[name] for name in _FORWARD_ARGUMENTS if name in arguments}
    z = forward(x=x.float(), **given).y.view(samples, -1, x.shape[-1])
    dz = dy.reshape(z.shape).float()
    if activation != "none":
        dz = backpropagate_activation_into_z_(dz.contiguous(), _modulate_(z.clone(), scale, shift), activation)
    dshift = None if shift is None else dz.sum(1).view(shift.shape).to(shift.dtype)
    dscale = None
    if scale is not None:
        dscale = (dz * z).sum(1).view(scale.shape).to(scale.dtype)
        dz = dz * _compute_factors(scale, samples)
    gradients: Backward = backward(dy=dz.view(dy.shape), x=x, **arguments)
    return gradients._replace(dscale=dscale, dshift=dshift)


_FORWARD_ARGUMENTS = ("weight", "bias", "eps", "weight_offset", "residual", "activation")


def _count_samples(x: Tensor, scale: Tensor | None, shift: Tensor | None, arguments: dict[str, Any]) -> int:
    """Count the samples of a valid call; 0 if the reference must compute the call or refuse it."""
    modulations = {name: each for name, each in (("scale", scale), ("shift", shift)) if each is not None}
    if not all(has_float_tensors(each.shape, each) for each in modulations.values()):
        return 0
    if not (is_zero_dropout(arguments["dropout"]) and has_float_tensors(x.shape, x) and x.numel()):
        return 0
    try:
        return count_samples(tuple(x.shape), modulations)
    except KernelInputError:
        return 0


def _compute_factors(scale: Tensor, samples: int) -> Tensor:
    """Compute the factors 1 + scale, [samples, 1, cols] float32."""
    return scale.float().reshape(samples, 1, -1) + 1.0


def _modulate_(z: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """Compute z * (1 + scale) + shift in z's memory, [samples, tokens, cols] float32."""
    if scale is not None:
        z.mul_(_compute_factors(scale, z.shape[0]))
    if shift is not None:
        z.add_(shift.float().reshape(z.shape[0], 1, -1))
    return z
