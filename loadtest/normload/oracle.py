"""What the server should have answered, from the definitions, in numpy and float64."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from normserve.client import DType, HostTensor

from normload.elements import Floats, widen
from normload.workload import Case

_EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6, "group_norm": 1e-5}

# How far an element may be off: a few roundings of the element type, relative to its size and to what is
# usual in its tensor, and some roundings of float32, relative to the terms that it was summed from.
_ELEMENT_TOLERANCE = {DType.FLOAT32: 1e-5, DType.FLOAT16: 4e-3, DType.BFLOAT16: 3e-2}
_SUM_TOLERANCE = 2e-6
_ALWAYS_ALLOWED = 1e-7


@dataclass(frozen=True, slots=True)
class Reference:
    """A tensor as it should be.

    Attributes:
        values: exact.
        terms: how large, element by element, are the terms that were summed to the values, and may cancel.
    """

    values: Floats
    terms: Floats


@dataclass(frozen=True, slots=True)
class _Normalised:
    """x_hat and what its gradient needs.

    Attributes:
        h: what was normalised, x or x + residual.
        rstd: in the shape of the groups.
        noise: how much larger than x_hat's own are the roundings that it carries: |h| >> sigma costs digits.
        channels: the shape in which weight and bias broadcast.
    """

    h: Floats
    x_hat: Floats
    rstd: Floats
    noise: Floats
    channels: tuple[int, ...]


def expected(case: Case, tensors: Mapping[str, HostTensor]) -> dict[str, Reference]:
    """The exact answer by the names of the API."""
    given = {name: widen(tensor) for name, tensor in tensors.items()}
    normalised = _normalise(case, given)
    weight = given["weight"].reshape(normalised.channels) if "weight" in given else np.ones(1)
    bias = given["bias"].reshape(normalised.channels) if "bias" in given else np.zeros(1)
    affine = Reference(normalised.x_hat * weight + bias, normalised.noise * np.abs(weight) + np.abs(bias))
    factor, shift = _modulation(case, given)
    z = affine.values * factor + shift
    z_terms = affine.terms * np.abs(factor) + np.abs(shift)
    activation, derivative = _ACTIVATIONS[case.activation]
    if not case.is_backward:
        answer = {"y": Reference(activation(z), z_terms)}
        if case.residual:
            answer["residual_out"] = Reference(normalised.h, np.abs(normalised.h))
        return answer

    dz = given["dy"] * derivative(z)
    answer = {"dx": _input_gradient(case, normalised, dz * factor * weight)}
    summed = tuple(axis for axis, size in enumerate(normalised.channels) if size == 1)
    terms = (np.abs(given["dy"] * factor) * normalised.noise).sum(summed).reshape(-1)
    if "weight" in given:
        answer["dweight"] = Reference((dz * factor * normalised.x_hat).sum(summed).reshape(-1), terms)
    if "bias" in given:
        answer["dbias"] = Reference((dz * factor).sum(summed).reshape(-1), terms)
    if case.adaptive:
        positions = _position_axes(case)
        dz_terms = np.abs(given["dy"]) * z_terms
        terms = np.abs(given["dy"]) * affine.terms + dz_terms * np.abs(affine.values)
        answer["dscale"] = Reference((dz * affine.values).sum(positions), terms.sum(positions))
        answer["dshift"] = Reference(dz.sum(positions), (np.abs(dz) + dz_terms).sum(positions))
    return answer


def fault(case: Case, tensors: Mapping[str, HostTensor], answer: Mapping[str, HostTensor]) -> str | None:
    """Say what is wrong with an answer; None when it is right."""
    should_be = expected(case, tensors)
    if answer.keys() != should_be.keys():
        return f"expected {', '.join(should_be)}, got {', '.join(answer)}"
    for name, reference in should_be.items():
        owner = tensors[name.removeprefix("d")] if case.is_backward else tensors["x"]
        if found := _difference(reference, answer[name], owner.dtype):
            return f"{name} of {case.shape}: {found}"
    return None


def _difference(reference: Reference, tensor: HostTensor, dtype: DType) -> str | None:
    if (tensor.dtype, tensor.shape) != (dtype, reference.values.shape):
        expected_form = f"{dtype.value} {reference.values.shape}"
        return f"expected {expected_form}, got {tensor.dtype.value} {tensor.shape}"
    values = reference.values
    off = np.abs(widen(tensor) - values)
    usual = math.sqrt(np.mean(values**2)) if values.size else 0.0
    allowed = _ELEMENT_TOLERANCE[dtype] * (np.abs(values) + usual) + _SUM_TOLERANCE * reference.terms
    # Written so that a NaN is wrong.
    if np.all(off <= allowed + _ALWAYS_ALLOWED):
        return None
    return f"off by {np.max(off / (allowed + _ALWAYS_ALLOWED)):.3g} times the tolerance"


def _normalise(case: Case, given: Mapping[str, Floats]) -> _Normalised:
    h = given["x"] + given["residual"] if case.residual else given["x"]
    channels = [1] * h.ndim
    channels[case.channel_axis] = h.shape[case.channel_axis]
    grouped, axes = _grouped(case, h)
    mean = 0.0 if case.op == "rms_norm" else grouped.mean(axes, keepdims=True)
    rstd = 1 / np.sqrt(np.square(grouped - mean).mean(axes, keepdims=True) + _EPS[case.op])
    return _Normalised(
        h=h,
        x_hat=((grouped - mean) * rstd).reshape(h.shape),
        rstd=rstd,
        noise=1 + (np.abs(grouped) * rstd).reshape(h.shape),
        channels=tuple(channels),
    )


def _modulation(case: Case, given: Mapping[str, Floats]) -> tuple[Floats, Floats]:
    """1 + scale and shift, in shapes that broadcast."""
    if not case.adaptive:
        return np.ones(1), np.zeros(1)
    positions = _position_axes(case)
    return 1 + np.expand_dims(given["scale"], positions), np.expand_dims(given["shift"], positions)


def _position_axes(case: Case) -> tuple[int, ...]:
    """The axes of x but samples and channels."""
    rank = len(case.shape)
    return tuple(axis for axis in range(rank) if axis not in (0, case.channel_axis % rank))


def _grouped(case: Case, values: Floats) -> tuple[Floats, tuple[int, ...]]:
    """The values with an axis for the groups, and the axes over which each group is normalised."""
    if case.op != "group_norm":
        return values, (-1,)
    batch, groups = values.shape[0], case.num_groups
    if case.layout == "nchw":
        return values.reshape(batch, groups, -1), (2,)
    return values.reshape(batch, -1, groups, values.shape[-1] // groups), (1, 3)


def _input_gradient(case: Case, normalised: _Normalised, dx_hat: Floats) -> Reference:
    """rstd * (dx_hat - mean(dx_hat) - x_hat * mean(dx_hat * x_hat)); RMSNorm has no first mean."""
    gradient, axes = _grouped(case, dx_hat)
    x_hat, _ = _grouped(case, normalised.x_hat)
    along = (gradient * x_hat).mean(axes, keepdims=True)
    mean = 0.0 if case.op == "rms_norm" else gradient.mean(axes, keepdims=True)
    dx = normalised.rstd * (gradient - mean - x_hat * along)
    size = np.abs(gradient)
    terms = normalised.rstd * (size + size.mean(axes, keepdims=True))
    shape = normalised.h.shape
    return Reference(dx.reshape(shape), terms.reshape(shape) * normalised.noise)


def _sigmoid(z: Floats) -> Floats:
    s: Floats = 0.5 * (1 + np.tanh(z / 2))
    return s


def _silu_derivative(z: Floats) -> Floats:
    s = _sigmoid(z)
    return s * (1 + z * (1 - s))


_A, _B = math.sqrt(2 / math.pi), 0.044715


def _gelu_tanh(z: Floats) -> Floats:
    y: Floats = z / 2 * (1 + np.tanh(_A * (z + _B * z**3)))
    return y


def _gelu_tanh_derivative(z: Floats) -> Floats:
    t = np.tanh(_A * (z + _B * z**3))
    dz: Floats = (1 + t) / 2 + z / 2 * (1 - t**2) * _A * (1 + 3 * _B * z**2)
    return dz


_ACTIVATIONS: dict[str, tuple[Callable[[Floats], Floats], Callable[[Floats], Floats]]] = {
    "none": (lambda z: z, np.ones_like),
    "silu": (lambda z: z * _sigmoid(z), _silu_derivative),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_derivative),
}
