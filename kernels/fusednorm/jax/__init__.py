"""LayerNorm, RMSNorm and GroupNorm of JAX arrays: the library's kernels on a GPU, jax.numpy on a CPU.

`layer_norm`, `rms_norm`, `group_norm`, and `add_layer_norm` and so on, which normalise residual + x, have the
arguments and results of the functions of `fusednorm` for torch.  They work under `jit`, `grad`, `vmap`, `scan`,
`checkpoint` and `shard_map`; forward-mode differentiation (`jvp`, `jacfwd`) does not.  Options are Python values: a
traced eps is refused, and another one compiles the function again.  The seed of dropout may be traced.

A GPU needs Triton, which compiles the kernels; torch is not needed.
"""

from importlib import util
from typing import Literal

if util.find_spec("jax") is None:
    raise ModuleNotFoundError("fusednorm.jax needs JAX: pip install 'fusednorm-core[jax]'", name="jax")

import jax

from fusednorm.arguments.checks import ActivationName, LayoutName, require_residual
from fusednorm.arguments.inputs import NormInputs
from fusednorm.arguments.options import NormOptions, OptionValues
from fusednorm.errors import KernelInputError, UnsupportedShapeError
from fusednorm.jax.calls import dispatch_norm
from fusednorm.results import Added

GroupLayoutName = Literal["nchw", "nhwc"]
"""The layouts of GroupNorm's x: "nchw" is [N, C, *spatial], "nhwc" is [N, *spatial, C]."""


def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    scale: jax.Array | None = None,
    shift: jax.Array | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    layout: LayoutName | None = None,
) -> jax.Array:
    """Apply LayerNorm over the last axis of x, or over its channels, differentiable in all arrays.

    y = dropout(act(z * (1 + scale) + shift)), z = (x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias,
    with the mean and the biased variance of each row.  Statistics and sums are float32, and the result is rounded
    once.

    Args:
        x: [..., cols], float32, float16 or bfloat16.
        weight: [cols], any of these dtypes; None (default) for ones.  [heads, cols] for a separate weight per
            head of x [..., heads, cols].
        bias: [cols] or [heads, cols], any of these dtypes; None (default) for zeros.
        eps: added to the variance; at least 0 and finite; default 1e-5.
        weight_offset: 0, or 1 for a weight that is stored around zero, as Gemma's; default 0.0.  1 needs a weight.
        scale, shift: one row for each sample of x, or for each of its leading axes: x.shape[:k] and the last axis,
            with axes of one element between or without ([N, cols] or [N, 1, cols] for x [N, tokens, cols]), any of
            these dtypes; None (default) for zeros.  Both have one shape.
        activation: "none" (default), "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  Other values are divided by 1 - dropout.
        seed: an int of 64 bits, or an array of shape () and any integer dtype; determines the mask of dropout,
            which needs it; default None.  Another one does not compile the function again.
        layout: None (default) for rows along the last axis; "nchw" for a norm over the channels of x [N, C,
            *spatial], as LayerNorm2d: parameters [C], scale and shift [N, C].

    Returns:
        jax.Array: y, in x's shape and dtype.

    Raises:
        KernelInputError: a wrong shape, dtype or value.
        UnsupportedShapeError: over 2^30 columns; on a GPU over 65535 heads with separate parameters, in backward
            with such heads over 12288 columns of a 16-bit x or 8192 of a float32 one, and symbolic sizes.
        TypeError: an argument is neither an array of JAX nor of numpy.
        ModuleNotFoundError: a GPU without Triton installed.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from fusednorm.jax import layer_norm
        >>> x, weight = jax.random.normal(jax.random.key(0), (8, 1024)), jnp.ones(1024)
        >>> loss = lambda x, weight: layer_norm(x, weight, activation="gelu").sum()
        >>> dx, dweight = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weight)
        >>> dx.shape, dweight.shape
        ((8, 1024), (1024,))
    """
    values: OptionValues = "layer_norm", 0, eps, weight_offset, activation, dropout, None, negative_slope, layout
    return dispatch_norm(NormOptions._make(values), NormInputs(x, weight, bias, None, scale, shift), seed)[0]


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale: jax.Array | None = None,
    shift: jax.Array | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    layout: LayoutName | None = None,
) -> jax.Array:
    """Apply RMSNorm over the last axis of x, or over its channels, differentiable in all arrays.

    y = dropout(act(z * (1 + scale) + shift)), z = x / sqrt(mean(x^2) + eps) * (weight + weight_offset).  Sums are
    float32, and the result is rounded once.

    Args:
        x: [..., cols], float32, float16 or bfloat16.
        weight: [cols], any of these dtypes; None (default) for ones.  [heads, cols] for a separate weight per
            head of x [..., heads, cols].
        eps: added to the mean of squares; at least 0 and finite; default 1e-6.
        weight_offset: 0, or 1 for a weight that is stored around zero, as Gemma's; default 0.0.  1 needs a weight.
        scale, shift: as for `layer_norm`: x.shape[:k] and the last axis, any of these dtypes; None (default) for
            zeros.
        activation: "none" (default), "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  Other values are divided by 1 - dropout.
        seed: an int of 64 bits, or an array of shape () and any integer dtype; determines the mask of dropout,
            which needs it; default None.  Another one does not compile the function again.
        layout: None (default) for rows along the last axis; "nchw" for a norm over the channels of x [N, C,
            *spatial]: a weight [C], scale and shift [N, C].

    Returns:
        jax.Array: y, in x's shape and dtype.

    Raises:
        KernelInputError, UnsupportedShapeError, TypeError, ModuleNotFoundError: as in `layer_norm`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from fusednorm.jax import rms_norm
        >>> rms_norm(jnp.full((2, 4), 3.0), jnp.zeros(4), weight_offset=1.0)[0].round(3).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    values: OptionValues = "rms_norm", 0, eps, weight_offset, activation, dropout, None, negative_slope, layout
    return dispatch_norm(NormOptions._make(values), NormInputs(x, weight, None, None, scale, shift), seed)[0]


def group_norm(
    x: jax.Array,
    num_groups: int,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
    *,
    scale: jax.Array | None = None,
    shift: jax.Array | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    layout: GroupLayoutName = "nchw",
) -> jax.Array:
    """Apply GroupNorm to samples of channels, differentiable in all arrays.

    y = dropout(act(z * (1 + scale) + shift)), z = (x - mean) / sqrt(var + eps) * weight + bias, with the mean and
    the biased variance of each group of C / num_groups channels in a sample.  Statistics and sums are float32, and
    the result is rounded once.

    Args:
        x: [N, C, *spatial], with layout "nhwc" [N, *spatial, C]; float32, float16 or bfloat16.
        num_groups: number of groups, an int that divides C.
        weight: [C], any of these dtypes; None (default) for ones.
        bias: [C], any of these dtypes; None (default) for zeros.
        eps: added to the variance; at least 0 and finite; default 1e-5.
        scale, shift: [N, C], any of these dtypes; None (default) for zeros.
        activation: "none" (default), "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        dropout: probability of a zero, in [0, 1); default 0.0.  Other values are divided by 1 - dropout.  The mask
            depends on the layout.
        seed: an int of 64 bits, or an array of shape () and any integer dtype; determines the mask of dropout,
            which needs it; default None.  Another one does not compile the function again.
        layout: the axis of channels: "nchw" (default) for axis 1, "nhwc" for the last one.

    Returns:
        jax.Array: y, in x's shape and dtype.

    Raises:
        KernelInputError: a wrong shape, dtype or value, or num_groups does not divide C.
        UnsupportedShapeError: on a GPU, the call needs 2^31 programs or more, or sizes of x are symbolic.
        TypeError: an argument is neither an array of JAX nor of numpy.
        ModuleNotFoundError: a GPU without Triton installed.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from fusednorm.jax import group_norm
        >>> x = jax.random.normal(jax.random.key(0), (2, 16, 16, 64))
        >>> group_norm(x, 32, jnp.ones(64), jnp.zeros(64), activation="silu", layout="nhwc").shape
        (2, 16, 16, 64)
    """
    values: OptionValues = "group_norm", num_groups, eps, 0.0, activation, dropout, None, negative_slope, None
    return dispatch_norm(NormOptions._make(values), NormInputs(x, weight, bias, None, scale, shift), seed, layout)[
        0
    ]


def add_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    scale: jax.Array | None = None,
    shift: jax.Array | None = None,
    gate: jax.Array | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    layout: LayoutName | None = None,
) -> Added[jax.Array]:
    """Apply LayerNorm to h = residual + gate * x and return the sum too, differentiable in all arrays.

    The sum is normalised before it is rounded.  All else is as in `layer_norm`.

    Args:
        x: [..., cols], float32, float16 or bfloat16.
        residual: x's shape, any of these dtypes, independent of x's.
        gate: the factor of x, shaped as scale, any of these dtypes; None (default) for ones.  Scale, shift and gate
            have one shape.
        weight, bias, eps, weight_offset, scale, shift, activation, negative_slope, dropout, seed, layout: as for
            `layer_norm`.

    Returns:
        Added: a named tuple of y, in x's shape and dtype, and residual_out = residual + gate * x, in the residual's
            dtype.

    Raises:
        KernelInputError, UnsupportedShapeError, TypeError, ModuleNotFoundError: as in `layer_norm`; the first also
            without a residual.

    Examples:
        >>> import jax.numpy as jnp
        >>> from fusednorm.jax import add_layer_norm
        >>> y, residual_out = add_layer_norm(jnp.ones((8, 64), jnp.bfloat16), jnp.zeros((8, 64)))
        >>> str(y.dtype), str(residual_out.dtype)
        ('bfloat16', 'float32')
    """
    require_residual(residual, "layer_norm")
    values: OptionValues = "layer_norm", 0, eps, weight_offset, activation, dropout, None, negative_slope, layout
    inputs = NormInputs(x, weight, bias, residual, scale, shift, gate)
    return Added(*dispatch_norm(NormOptions._make(values), inputs, seed))


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    scale: jax.Array | None = None,
    shift: jax.Array | None = None,
    gate: jax.Array | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    layout: LayoutName | None = None,
) -> Added[jax.Array]:
    """Apply RMSNorm to h = residual + gate * x and return the sum too, differentiable in all arrays.

    The sum is normalised before it is rounded.  All else is as in `rms_norm`.

    Args:
        x: [..., cols], float32, float16 or bfloat16.
        residual: x's shape, any of these dtypes, independent of x's.
        gate: the factor of x, shaped as scale, any of these dtypes; None (default) for ones.  Scale, shift and gate
            have one shape.
        weight, eps, weight_offset, scale, shift, activation, negative_slope, dropout, seed, layout: as for
            `rms_norm`.

    Returns:
        Added: a named tuple of y, in x's shape and dtype, and residual_out = residual + gate * x, in the residual's
            dtype.

    Raises:
        KernelInputError, UnsupportedShapeError, TypeError, ModuleNotFoundError: as in `layer_norm`; the first also
            without a residual.

    Examples:
        >>> import jax.numpy as jnp
        >>> from fusednorm.jax import add_rms_norm
        >>> y, residual_out = add_rms_norm(jnp.ones((8, 64)), jnp.full((8, 64), 2.0))
        >>> float(residual_out[0, 0])
        3.0
    """
    require_residual(residual, "rms_norm")
    values: OptionValues = "rms_norm", 0, eps, weight_offset, activation, dropout, None, negative_slope, layout
    inputs = NormInputs(x, weight, None, residual, scale, shift, gate)
    return Added(*dispatch_norm(NormOptions._make(values), inputs, seed))


def add_group_norm(
    x: jax.Array,
    residual: jax.Array,
    num_groups: int,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
    *,
    scale: jax.Array | None = None,
    shift: jax.Array | None = None,
    activation: ActivationName | None = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    seed: int | jax.Array | None = None,
    layout: GroupLayoutName = "nchw",
) -> Added[jax.Array]:
    """Apply GroupNorm to h = x + residual and return the sum too, differentiable in all arrays.

    The sum is normalised before it is rounded.  All else is as in `group_norm`.

    Args:
        x: [N, C, *spatial], with layout "nhwc" [N, *spatial, C]; float32, float16 or bfloat16.
        residual: x's shape, any of these dtypes.
        num_groups, weight, bias, eps, scale, shift, activation, negative_slope, dropout, seed, layout: as for
            `group_norm`.

    Returns:
        Added: a named tuple of y, in x's shape and dtype, and residual_out = x + residual, in x's dtype.

    Raises:
        KernelInputError, UnsupportedShapeError, TypeError, ModuleNotFoundError: as in `group_norm`; the first also
            without a residual.

    Examples:
        >>> import jax.numpy as jnp
        >>> from fusednorm.jax import add_group_norm
        >>> y, residual_out = add_group_norm(jnp.ones((2, 64, 4, 4)), jnp.ones((2, 64, 4, 4)), 32)
        >>> y.shape, residual_out.shape
        ((2, 64, 4, 4), (2, 64, 4, 4))
    """
    require_residual(residual, "group_norm")
    values: OptionValues = "group_norm", num_groups, eps, 0.0, activation, dropout, None, negative_slope, None
    inputs = NormInputs(x, weight, bias, residual, scale, shift)
    return Added(*dispatch_norm(NormOptions._make(values), inputs, seed, layout))


__all__ = [
    "Added",
    "KernelInputError",
    "UnsupportedShapeError",
    "add_group_norm",
    "add_layer_norm",
    "add_rms_norm",
    "group_norm",
    "layer_norm",
    "rms_norm",
]
