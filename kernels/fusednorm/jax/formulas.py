"""The passes in jax.numpy, by the formulas of `fusednorm.reference` in float32: on a CPU, and of some batches.

The variance is that of deviations from a corrected mean, every result is rounded once, and a NaN stays in its row
or group.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fusednorm.arguments.checks import count_samples, has_heads, select_modulations
from fusednorm.arguments.dropout import PHILOX_ROUNDS, compute_dropout_threshold
from fusednorm.arguments.inputs import BackwardInputs, NormInputs
from fusednorm.arguments.options import NormOptions
from fusednorm.jax.passes import SEED, ForwardPass, NormPass

_HALF_WORD = 0xFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_TANH_SCALE, _TANH_CUBE = math.sqrt(2.0 / math.pi), 0.044715

Function = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class NormAxes:
    """Shapes and axes with which the same code computes LayerNorm, RMSNorm and GroupNorm.

    Attributes:
        shape: the shape as which x is viewed.
        axes: those of `shape` that are normalised over.
        parameter_shape, parameter_axes: the shape as which weight and bias are broadcast, and the axes over which
            their gradients are sums.
        sample_shape, sample_axes: the same of scale, shift and gate.
        mask_order: the axes of `shape` in the order in which dropout's rows and positions lie.
        mask_row_axes: how many of these are rows; the others are positions.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    parameter_shape: tuple[int, ...]
    parameter_axes: tuple[int, ...]
    sample_shape: tuple[int, ...]
    sample_axes: tuple[int, ...]
    mask_order: tuple[int, ...]
    mask_row_axes: int

    @classmethod
    def of_pass(cls, norm_pass: NormPass, inputs: NormInputs[jax.Array]) -> "NormAxes":
        """Find the axes of a pass whose inputs were checked."""
        shape = inputs.x.shape
        if norm_pass.is_of_groups:
            return cls._of_groups(shape, norm_pass.options.num_groups, norm_pass.channels_last)
        if norm_pass.options.layout is not None:
            n, c, hw = shape[0], shape[1], math.prod(shape[2:])
            return cls((n, c, hw), (1,), (1, c, 1), (0, 2), (n, c, 1), (2,), (0, 2, 1), 2)
        cols = shape[-1]
        modulations = select_modulations(inputs.scale, inputs.shift, inputs.gate)
        if modulations:
            samples = count_samples(shape, modulations)
            rows = math.prod(shape[:-1]) // samples
            view, sample = (samples, rows, cols), (samples, 1, cols)
            return cls(view, (2,), (1, 1, cols), (0, 1), sample, (1,), (0, 1, 2), 2)
        heads = shape[-2] if has_heads(inputs.weight, inputs.bias) else 1
        tokens = math.prod(shape[:-1]) // heads
        return cls((tokens, heads, cols), (2,), (1, heads, cols), (0,), (), (), (0, 1, 2), 2)

    @classmethod
    def _of_groups(cls, shape: tuple[int, ...], groups: int, channels_last: bool) -> "NormAxes":
        n, channels = shape[0], shape[-1 if channels_last else 1] // groups
        hw = math.prod(shape[1:-1] if channels_last else shape[2:])
        if channels_last:
            of_channels = (1, groups, channels)
            return cls(
                (n, hw, groups, channels),
                (1, 3),
                (1, *of_channels),
                (0, 1),
                (n, *of_channels),
                (1,),
                (0, 1, 2, 3),
                1,
            )
        of_channels = (groups, channels, 1)
        return cls(
            (n, groups, channels, hw), (2, 3), (1, *of_channels), (0, 3), (n, *of_channels), (3,), (0, 1, 2, 3), 1
        )


def compute_by_formulas(norm_pass: NormPass, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Compute a pass in jax.numpy, and return its results by name, in the order of `NormPass.list_results`."""
    given = norm_pass.make_inputs(inputs)
    axes = NormAxes.of_pass(norm_pass, given)
    compute = _compute_forward if isinstance(norm_pass, ForwardPass) else _compute_backward
    factors = _compute_dropout_factors(norm_pass.options.dropout, inputs[SEED], axes) if SEED in inputs else None
    values = compute(norm_pass.options, axes, given, factors)
    return {
        name: values[name].reshape(result.shape).astype(result.dtype)
        for name, result in norm_pass.list_results(inputs).items()
    }


def _compute_forward(
    options: NormOptions, axes: NormAxes, inputs: NormInputs[jax.Array], dropout_factors: jax.Array | None
) -> dict[str, jax.Array]:
    """Compute all results of a forward pass, by name, in float32."""
    step = _AffineStep(options, axes, inputs)
    h = step.add_residual()
    centred, mean, rstd = _compute_statistics(options, axes, h)
    apply, _ = _make_activation(options.activation, options.negative_slope)
    y = apply(step.modulate(step.scale_by_parameters(centred * rstd)))
    if dropout_factors is not None:
        y = y * dropout_factors
    return {"y": y, "mean": mean, "rstd": rstd, "residual_out": h}


def _compute_backward(
    options: NormOptions, axes: NormAxes, inputs: BackwardInputs[jax.Array], dropout_factors: jax.Array | None
) -> dict[str, jax.Array]:
    """Compute all gradients, by name, in float32; the formulas are in `fusednorm.reference`."""
    step = _AffineStep(options, axes, inputs)
    h = step.add_residual()
    centred, rstd = _use_statistics(options, axes, inputs, h)
    x_hat = centred * rstd
    z = step.scale_by_parameters(x_hat)
    ds = step.view(inputs.dy)
    if dropout_factors is not None:
        ds = ds * dropout_factors
    _, differentiate = _make_activation(options.activation, options.negative_slope)
    ds = ds * differentiate(step.modulate(z))
    dz = ds if inputs.scale is None else ds * (1.0 + step.broadcast_to_samples(inputs.scale))
    g = dz if inputs.weight is None else dz * step.get_weight()
    dh = g - x_hat * _mean(g * x_hat, axes)
    if not options.is_rms:
        dh = dh - _mean(g, axes)
    dh = dh * rstd
    if inputs.dresidual_out is not None:
        dh = dh + step.view(inputs.dresidual_out)
    made = {
        "dx": dh if inputs.gate is None else dh * step.broadcast_to_samples(inputs.gate),
        "dresidual": dh,
        "dweight": jnp.sum(dz * x_hat, axes.parameter_axes),
        "dbias": jnp.sum(dz, axes.parameter_axes),
    }
    if axes.sample_axes:
        made["dscale"] = jnp.sum(ds * z, axes.sample_axes)
        made["dshift"] = jnp.sum(ds, axes.sample_axes)
        made["dgate"] = jnp.sum(dh * step.view(inputs.x), axes.sample_axes)
    return made


@dataclass(frozen=True, slots=True)
class _AffineStep:
    """The steps before and after the normalisation, with the parameters of a call."""

    options: NormOptions
    axes: NormAxes
    inputs: Any

    def view(self, array: jax.Array) -> jax.Array:
        """View an array of x's shape in float32, as the axes say."""
        return array.astype(jnp.float32).reshape(self.axes.shape)

    def broadcast_to_samples(self, array: jax.Array) -> jax.Array:
        """View scale, shift or gate in float32, so that it broadcasts."""
        return array.astype(jnp.float32).reshape(self.axes.sample_shape)

    def get_weight(self) -> jax.Array:
        """Return the factors of x_hat, so that they broadcast."""
        weight = self.inputs.weight.astype(jnp.float32).reshape(self.axes.parameter_shape)
        return weight + self.options.weight_offset

    def add_residual(self) -> jax.Array:
        """Compute h = residual + gate * x."""
        h = self.view(self.inputs.x)
        if self.inputs.gate is not None:
            h = h * self.broadcast_to_samples(self.inputs.gate)
        return h if self.inputs.residual is None else h + self.view(self.inputs.residual)

    def scale_by_parameters(self, x_hat: jax.Array) -> jax.Array:
        """Compute z = x_hat * (weight + weight_offset) + bias."""
        z = x_hat if self.inputs.weight is None else x_hat * self.get_weight()
        if self.inputs.bias is None:
            return z
        return z + self.inputs.bias.astype(jnp.float32).reshape(self.axes.parameter_shape)

    def modulate(self, z: jax.Array) -> jax.Array:
        """Compute z * (1 + scale) + shift."""
        if self.inputs.scale is not None:
            z = z * (1.0 + self.broadcast_to_samples(self.inputs.scale))
        return z if self.inputs.shift is None else z + self.broadcast_to_samples(self.inputs.shift)


def _mean(values: jax.Array, axes: NormAxes) -> jax.Array:
    return jnp.mean(values, axes.axes, keepdims=True)


def _compute_statistics(
    options: NormOptions, axes: NormAxes, h: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute h - mean, the mean and the reciprocal standard deviation; for RMSNorm h, 0 and that of h."""
    mean = jnp.zeros((), jnp.float32)
    centred = h
    if not options.is_rms:
        rounded = _mean(h, axes)
        centred = h - rounded
        # The rounding error of a large mean is large compared with the deviations.
        rest = _mean(centred, axes)
        centred, mean = centred - rest, rounded + rest
    return centred, mean, lax.rsqrt(_mean(centred * centred, axes) + options.eps)


def _use_statistics(
    options: NormOptions, axes: NormAxes, inputs: BackwardInputs[jax.Array], h: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return h - mean and rstd, by the saved statistics if there are any."""
    if inputs.rstd is None:
        centred, _, rstd = _compute_statistics(options, axes, h)
        return centred, rstd
    aligned = tuple(1 if axis in axes.axes else size for axis, size in enumerate(axes.shape))
    centred = h if inputs.mean is None else h - inputs.mean.reshape(aligned)
    return centred, inputs.rstd.reshape(aligned)


def _make_activation(name: str, negative_slope: float) -> tuple[Function, Function]:
    """Return the activation of a name, and its derivative."""

    def differentiate_silu(z: jax.Array) -> jax.Array:
        s = jax.nn.sigmoid(z)
        return s * (1.0 + z * (1.0 - s))

    def differentiate_gelu(z: jax.Array) -> jax.Array:
        density = jnp.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
        return 0.5 * (1.0 + lax.erf(z * math.sqrt(0.5))) + z * density

    def differentiate_gelu_tanh(z: jax.Array) -> jax.Array:
        t = jnp.tanh(_TANH_SCALE * (z + _TANH_CUBE * z * z * z))
        slope = _TANH_SCALE * (1.0 + 3.0 * _TANH_CUBE * z * z)
        return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * slope

    functions: dict[str, tuple[Function, Function]] = {
        "none": (lambda z: z, jnp.ones_like),
        "relu": (lambda z: jnp.maximum(z, 0.0), lambda z: jnp.where(z > 0.0, 1.0, 0.0)),
        "leaky_relu": (
            lambda z: jnp.where(z > 0.0, z, z * negative_slope),
            lambda z: jnp.where(z > 0.0, 1.0, negative_slope),
        ),
        "silu": (lambda z: z * jax.nn.sigmoid(z), differentiate_silu),
        "gelu": (lambda z: 0.5 * z * (1.0 + lax.erf(z * math.sqrt(0.5))), differentiate_gelu),
        "gelu_tanh": (
            lambda z: 0.5 * z * (1.0 + jnp.tanh(_TANH_SCALE * (z + _TANH_CUBE * z * z * z))),
            differentiate_gelu_tanh,
        ),
    }
    return functions[name]


def _compute_dropout_factors(dropout: float, seed: jax.Array, axes: NormAxes) -> jax.Array:
    """Compute dropout's factor of each element, 0 or 1 / (1 - dropout), in the shape of the axes."""
    sizes = [axes.shape[axis] for axis in axes.mask_order]
    rows, positions = math.prod(sizes[: axes.mask_row_axes]), math.prod(sizes[axes.mask_row_axes :])
    keep = compute_dropout_mask(seed, rows, positions, dropout)
    order = [axes.mask_order.index(axis) for axis in range(len(axes.shape))]
    return jnp.where(keep.reshape(sizes).transpose(order), 1.0 / (1.0 - dropout), 0.0).astype(jnp.float32)


def compute_dropout_mask(seed: jax.Array, rows: int, positions: int, p: float) -> jax.Array:
    """Compute whether dropout keeps each element of [rows, positions], bool: see `fusednorm.arguments.dropout`.

    Args: seed: see `passes.SEED`.
    """
    row = jnp.arange(rows, dtype=jnp.uint32)[:, None]
    quad = jnp.arange((positions + 3) // 4, dtype=jnp.uint32)[None, :]
    words = jnp.stack(_compute_philox_words(seed, row, quad), axis=-1).reshape(rows, -1)
    return words[:, :positions] >= jnp.uint32(compute_dropout_threshold(p))


def _compute_philox_words(seed: jax.Array, row: jax.Array, quad: jax.Array) -> tuple[jax.Array, ...]:
    """Compute four random words, uint32 [rows, quads], for each quad of a row.

    Args: seed: uint32 [2]; row, quad: uint32 [rows, 1] and [1, quads]; rows have fewer than 2^32.
    """
    key = [seed[0], seed[1]]
    row, quad = jnp.broadcast_arrays(row, quad)
    zeros = jnp.zeros_like(quad)
    words = (quad, row, zeros, zeros)
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply_words(words[0], _PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply_words(words[2], _PHILOX_MULTIPLIERS[1])
        words = (high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0)
        key = [word + jnp.uint32(step) for word, step in zip(key, _PHILOX_KEY_STEPS, strict=True)]
    return words


def _multiply_words(a: jax.Array, multiplier: int) -> tuple[jax.Array, jax.Array]:
    """Return high and low word of a 32 x 32-bit product, from products of halves, which fit 32 bits."""
    low_factor, high_factor = jnp.uint32(multiplier & _HALF_WORD), jnp.uint32(multiplier >> 16)
    low, high = a & _HALF_WORD, a >> 16
    first = high * low_factor + ((low * low_factor) >> 16)
    second = low * high_factor + (first & _HALF_WORD)
    return high * high_factor + (first >> 16) + (second >> 16), a * jnp.uint32(multiplier)
