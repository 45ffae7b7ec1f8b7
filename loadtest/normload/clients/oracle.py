"""The expected responses: torch on the CPU in float64, gradients by its autograd."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from normserve.client import DType, HostTensor
from normserve.client.quoting import sanitise_text
from torch.nn import functional

from normload.load.element_types import to_float64
from normload.load.request_cases import RequestCase

Tensor = torch.Tensor

_EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6, "group_norm": 1e-5, "layer_norm_chain": 1e-5}
_ACTIVATIONS: dict[str, Any] = {
    "none": lambda z, _: z,
    "relu": lambda z, _: functional.relu(z),
    "leaky_relu": functional.leaky_relu,
    "silu": lambda z, _: functional.silu(z),
    "gelu": lambda z, _: functional.gelu(z),
    "gelu_tanh": lambda z, _: functional.gelu(z, approximate="tanh"),
}

# Largest error of an element: a few roundings of the element type, relative to its size and to the typical size in
# its tensor, and some roundings of float32, relative to the terms of its sum.
_ELEMENT_TOLERANCE = {DType.FLOAT32: 1e-5, DType.FLOAT16: 4e-3, DType.BFLOAT16: 3e-2, DType.FLOAT8_E4M3FN: 7e-2}
_LARGEST_FLOAT8 = 448.0
_SUM_TOLERANCE = 2e-6
_ALWAYS_ALLOWED = 1e-7

# Number of unexpected names or sizes of a server's response that are shown.
_NAMED = 8


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """The exact values of a tensor in a response.  The tolerance of each value is computed from the magnitudes of
    the terms that were summed to it.

    Attributes:
        values: exact.
        terms: the size, for each element, of the terms that were summed to its value, which may cancel.
    """

    values: Tensor
    terms: Tensor


@dataclass(frozen=True, slots=True)
class _ForwardIntermediates:
    """The intermediate tensors of a forward pass in float64, in x's shape unless noted.  Tolerances and
    gradients are computed from them.

    Attributes:
        h: the input of the normalisation, x or residual + gate * x.
        affine: x_hat * weight + bias.
        z: affine * (1 + scale) + shift.
        y: the activation of z.
        affine_terms, z_terms: the sizes of the terms that were summed to affine and z.
        rstd: of each element's row or group.
        relative_noise: the rounding errors in x_hat relative to its own rounding: |h| >> sigma costs digits.
        factor: 1 + scale, in a shape that broadcasts.
    """

    h: Tensor
    affine: Tensor
    z: Tensor
    y: Tensor
    affine_terms: Tensor
    z_terms: Tensor
    rstd: Tensor
    relative_noise: Tensor
    factor: Tensor


def compute_expected(case: RequestCase, tensors: Mapping[str, HostTensor]) -> dict[str, ExpectedTensor]:
    """Compute, in float64, the tensors of the correct response to a case; return them by their names in the API."""
    given = {name: torch.from_numpy(to_float64(tensor)) for name, tensor in tensors.items()}
    if case.norms:
        return {"y": _compute_chain(case, given)}
    leaves = {name: value.requires_grad_(case.is_backward) for name, value in given.items() if name != "dy"}
    with torch.set_grad_enabled(case.is_backward):
        forward = _compute_forward(case, leaves)
    if case.is_backward:
        return _compute_gradients(case, leaves, given["dy"], forward)
    answer = {"y": ExpectedTensor(forward.y, forward.z_terms)}
    if case.out_dtype is DType.FLOAT8_E4M3FN:
        largest = forward.y.abs().amax(-1)
        terms = forward.z_terms.amax(-1)
        answer["scale"] = ExpectedTensor(largest / _LARGEST_FLOAT8, terms / _LARGEST_FLOAT8)
    if case.residual:
        answer["residual_out"] = ExpectedTensor(forward.h, forward.h.abs())
    return answer


def find_fault(
    case: RequestCase, tensors: Mapping[str, HostTensor], answer: Mapping[str, HostTensor]
) -> str | None:
    """Compare a response's tensors with the exact ones.  Return a description of the first fault, or
    None if all are within their tolerances.
    """
    should_be = compute_expected(case, tensors)
    if answer.keys() != should_be.keys():
        got = ", ".join(sanitise_text(name, 32) for name in sorted(answer)[:_NAMED])
        return f"expected {', '.join(should_be)}, got {got or 'none'}"
    for name, reference in should_be.items():
        scale = answer["scale"] if name == "y" and "scale" in answer else None
        if found := _find_difference(reference, answer[name], get_expected_dtype(case, name, tensors), scale):
            return f"{name} of {case.shape}: {found}"
    return None


def get_expected_dtype(case: RequestCase, name: str, tensors: Mapping[str, HostTensor]) -> DType:
    """Return the dtype that a tensor of the response must have.

    A gradient has the dtype of the tensor that it belongs to; residual_out has the residual's, or in
    GroupNorm x's.
    """
    if case.is_backward:
        return tensors[name.removeprefix("d")].dtype
    if name == "scale":
        return DType.FLOAT32
    if name == "y" and case.out_dtype is not None:
        return case.out_dtype
    of_sum = name == "residual_out" and case.op != "group_norm"
    return tensors["residual" if of_sum else "x"].dtype


def _has_own_residual_gradient(case: RequestCase) -> bool:
    """Return whether the residual's gradient is a separate tensor."""
    has_own_dtype = case.residual_dtype not in (None, case.dtype)
    return case.residual and case.op != "group_norm" and (case.is_gated or has_own_dtype)


def _find_difference(
    reference: ExpectedTensor, tensor: HostTensor, dtype: DType, scale: HostTensor | None = None
) -> str | None:
    """Compare one tensor with the exact values.  Return a description of the difference, or None if the
    tensor is within its tolerance.

    Args:
        dtype: the one that the tensor must have.
        scale: of a float8 tensor, one for each row; the values are multiplied by it before the comparison.
    """
    shape = tuple(reference.values.shape)
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        got = tensor.shape if len(tensor.shape) <= _NAMED else f"{len(tensor.shape)} dimensions"
        return f"expected {dtype.value} {shape}, got {tensor.dtype.value} {got}"
    values = reference.values
    found = torch.from_numpy(to_float64(tensor))
    if scale is not None:
        if scale.shape != shape[:-1]:
            return f"expected a scale of {shape[:-1]}, got another"
        found = found * torch.from_numpy(to_float64(scale)).unsqueeze(-1)
    off = (found - values).abs()
    usual = math.sqrt(values.square().mean()) if values.numel() else 0.0
    allowed = _ELEMENT_TOLERANCE[dtype] * (values.abs() + usual) + _SUM_TOLERANCE * reference.terms
    # Written so that a NaN is wrong.
    if bool((off <= allowed + _ALWAYS_ALLOWED).all()):
        return None
    return f"off by {float((off / (allowed + _ALWAYS_ALLOWED)).max()):.3g} times the tolerance"


def _compute_forward(case: RequestCase, inputs: Mapping[str, Tensor]) -> _ForwardIntermediates:
    """Compute y and its intermediate tensors in float64: the sum with the residual, the norm, scale and
    shift, the activation.
    """
    h = _add_residual(case, inputs)
    weight, bias = inputs.get("weight"), inputs.get("bias")
    if weight is not None:
        weight = weight + case.weight_offset
    affine = _normalise(case, h, weight, bias)
    factor, shift = _get_modulation(case, inputs)
    z = affine * factor + shift
    rstd, noise = _compute_statistics(case, h.detach())
    channels = [1] * h.ndim
    channels[case.channel_axis] = h.shape[case.channel_axis]
    if case.heads:
        channels[-2] = h.shape[-2]
    size = weight.detach().abs().reshape(channels) if weight is not None else 1.0
    affine_terms = noise * size + (bias.detach().abs().reshape(channels) if bias is not None else 0.0)
    z_terms = affine_terms * factor.detach().abs() + shift.detach().abs()
    y = _ACTIVATIONS[case.activation](z, case.negative_slope)
    return _ForwardIntermediates(h, affine, z, y, affine_terms, z_terms, rstd, noise, factor.detach())


def _add_residual(case: RequestCase, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute residual + gate * x, without what the case does not have."""
    x = inputs["x"]
    if case.is_gated:
        x = x * inputs["gate"].reshape(_get_sample_shape(case))
    return x + inputs["residual"] if case.residual else x


def _compute_chain(case: RequestCase, inputs: Mapping[str, Tensor]) -> ExpectedTensor:
    """Compute the result of several LayerNorms, one after another, and the magnitudes that determine its tolerance.

    Each norm scales the errors of earlier ones, which also change a row's moments.
    """
    y, terms = inputs["x"], _make_scalar(0.0)
    for norm in range(case.norms):
        weight, bias = inputs[f"weight.{norm}"], inputs[f"bias.{norm}"]
        rstd, noise = _compute_statistics(case, y)
        y = functional.layer_norm(y, y.shape[-1:], weight, bias, _EPS[case.op])
        terms = (noise + 3 * rstd * terms.amax(-1, keepdim=True)) * weight.abs() + bias.abs()
    return ExpectedTensor(y, terms)


def _normalise(case: RequestCase, h: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Normalise h by the case's operation, and apply weight and bias.

    With `case.heads` they are applied after torch's function, which takes them only for the last
    dimension.
    """
    eps = _EPS[case.op]
    if case.heads:
        scaled = _normalise(replace(case, heads=False), h, None, None)
        scaled = scaled if weight is None else scaled * weight
        return scaled if bias is None else scaled + bias
    # Torch's functions of rows take channels last, and its GroupNorm takes them first.
    place = 1 if case.op == "group_norm" else -1
    h = h.movedim(case.channel_axis, place)
    if case.op == "group_norm":
        y = functional.group_norm(h, case.num_groups, weight, bias, eps)
    elif case.op == "layer_norm":
        y = functional.layer_norm(h, h.shape[-1:], weight, bias, eps)
    else:
        y = functional.rms_norm(h, list(h.shape[-1:]), weight, eps)
    return y.movedim(place, case.channel_axis)


def _get_modulation(case: RequestCase, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the factor 1 + scale and the shift, in shapes that broadcast; 1 and 0 if the case has neither."""
    if not case.adaptive:
        return _make_scalar(1.0), _make_scalar(0.0)
    shape = _get_sample_shape(case)
    return 1 + inputs["scale"].reshape(shape), inputs["shift"].reshape(shape)


def _get_sample_shape(case: RequestCase) -> list[int]:
    """Return the shape in which a tensor of each sample broadcasts."""
    shape = [1] * len(case.shape)
    shape[0], shape[case.channel_axis] = case.shape[0], case.shape[case.channel_axis]
    return shape


def _compute_statistics(case: RequestCase, h: Tensor) -> tuple[Tensor, Tensor]:
    """Compute, for each element of h, the rstd of its row or group.  Also compute the relative rounding noise of
    x_hat, the normalised h.
    """
    grouped = _group_elements(case, h)
    mean = _make_scalar(0.0) if case.op == "rms_norm" else grouped.mean(-1, keepdim=True)
    rstd = ((grouped - mean).square().mean(-1, keepdim=True) + _EPS[case.op]).rsqrt()
    return _ungroup_elements(case, rstd.expand_as(grouped), h), _ungroup_elements(case, 1 + grouped.abs() * rstd, h)


def _make_scalar(value: float) -> Tensor:
    return torch.full((1,), value, dtype=torch.float64, device="cpu")


def _group_elements(case: RequestCase, values: Tensor) -> Tensor:
    """Reshape values so that the last axis contains the elements that are normalised together."""
    if case.op != "group_norm":
        return values.movedim(case.channel_axis, -1)
    return values.movedim(case.channel_axis, 1).reshape(len(values), case.num_groups, -1)


def _ungroup_elements(case: RequestCase, grouped: Tensor, like: Tensor) -> Tensor:
    if case.op != "group_norm":
        return grouped.movedim(-1, case.channel_axis)
    return grouped.reshape(like.movedim(case.channel_axis, 1).shape).movedim(1, case.channel_axis)


def _compute_gradients(
    case: RequestCase, leaves: Mapping[str, Tensor], dy: Tensor, forward: _ForwardIntermediates
) -> dict[str, ExpectedTensor]:
    """Compute the exact gradients with autograd.  Return with each the magnitudes of its summed terms, which
    determine its tolerance.

    Args:
        leaves: the inputs of `forward` by name, for which gradients are computed.
    """
    names = ("x", "weight", "bias", "scale", "shift", *(("gate", "residual") if case.is_gated else ()))
    wanted = [name for name in names if name in leaves]
    inputs = [forward.affine, forward.z, *(leaves[name] for name in wanted)]
    daffine, dz, *gradients = torch.autograd.grad(forward.y, inputs, dy)
    size = dy.abs()
    channel = case.channel_axis % dy.ndim
    own = (channel - 1, channel) if case.heads else (channel,)
    of_parameters = [axis for axis in range(dy.ndim) if axis not in own]
    of_samples = [axis for axis in of_parameters if axis != 0]
    dx_hat = daffine.abs()
    if (weight := leaves.get("weight")) is not None:
        sizes = [size if axis in own else 1 for axis, size in enumerate(dy.shape)]
        dx_hat = dx_hat * (weight.detach() + case.weight_offset).abs().reshape(sizes)
    grouped = _group_elements(case, dx_hat)
    along = _ungroup_elements(case, grouped.mean(-1, keepdim=True).expand_as(grouped), dy)
    affine = forward.affine.detach()
    parameters = size * forward.factor.abs() * forward.relative_noise
    # The sum over no axes at all would be one over every axis.
    parameters = parameters.sum(of_parameters) if of_parameters else parameters
    of_sum = forward.rstd * (dx_hat + along) * forward.relative_noise
    terms = {
        "x": of_sum,
        "weight": parameters,
        "bias": parameters,
    }
    if case.adaptive:
        affine = forward.affine.detach().abs()
        scale, shift = size * (forward.affine_terms + forward.z_terms * affine), dz.abs() + size * forward.z_terms
        of_rows = {"scale": scale, "shift": shift}
        if case.is_gated:
            of_rows["gate"] = of_sum * leaves["x"].detach().abs()
            terms["x"] = of_sum * leaves["gate"].detach().abs().reshape(_get_sample_shape(case))
            terms["residual"] = of_sum
        terms |= {name: each.sum(of_samples) if of_samples else each for name, each in of_rows.items()}
    found = {f"d{name}": ExpectedTensor(value, terms[name]) for name, value in zip(wanted, gradients, strict=True)}
    # Without a gate, one gradient is that of both.
    return {"dresidual": found["dx"]} | found if _has_own_residual_gradient(case) else found
