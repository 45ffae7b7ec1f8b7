"""The operations: each function turns arguments into a request, and its response into a result.

The functions here are the clients' methods without the sending; the methods take their signatures and texts
from here.  Each hands on its arguments by the names that they have in the HTTP API.  Parameters that are left out
are not sent, so the server's defaults hold.
"""

from collections.abc import Sequence
from typing import Literal

from normserve.client.calls.api_call import ApiCall
from normserve.client.calls.array_conversion import TensorLike
from normserve.client.calls.operation_calls import T, Tensors, make_backward_call, make_forward_call
from normserve.client.results import BackwardResult, ForwardResult
from normserve.codec.api_names import PARAMETERS, ActivationName


def layer_norm(
    x: T,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    layout: Literal["nchw", "nhwc"] | None = None,
    residual: Tensors | None = None,
    scale: Tensors | None = None,
    shift: Tensors | None = None,
    gate: Tensors | None = None,
    eps: float | None = None,
    weight_offset: float | None = None,
    activation: ActivationName | None = None,
    negative_slope: float | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    out_dtype: object = None,
    stats: bool | None = None,
    layer: str | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[ForwardResult[T]]:
    """Compute LayerNorm over the last axis, or over channels, on the server.

    y = dropout(act(z * (1 + scale) + shift)), z = w * (h - mean(h)) / sqrt(var(h) + eps) + bias, h = residual +
    gate * x, w = weight + weight_offset.  The method of `AsyncClient` is a coroutine with these arguments, to be
    awaited.

    Args:
        x: [..., N], or [B, C, *spatial] with layout="nchw", float32, float16 or bfloat16: an array of any library
            (on a CPU or a GPU) or a `HostTensor`.  Or a list of such tensors that share parameters, differ only in
            the size of the first axis and have at least two axes: then every argument with a value per row is a
            list, too, and so are such results.
        weight: [N], any of these dtypes; None (default) for ones.  [H, N] for a separate weight per head of x
            [..., H, N].  [C] with layout="nchw".
        bias: [N] or [H, N], or [C] with layout="nchw", any of these dtypes; None (default) for zeros.
        layout: "nhwc" (default) for a norm over the last axis of x; "nchw" for one over the channels of x [B, C,
            *spatial], at each position.
        residual: x's shape, any of these dtypes; None (default) for none.  The sum h is returned as
            `residual_out`, in the residual's dtype.
        scale, shift: a row for each sample, any of these dtypes: the shape of leading axes of x and of its last,
            [B, N] for x [B, tokens, N], with axes of one element between or without, or [B, C]
            with layout="nchw"; None (default) for zeros.
        gate: the factor of x in each sample, shaped as scale, any of these dtypes; None (default) for ones.  It
            needs a residual.
        eps: added to the variance; above 0; None (default) for 1e-5.
        weight_offset: 0 (default), or 1 for a weight that is stored around zero.
        activation: "none" (default), "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; 0.01 by default.  Only it takes another.
        dropout: probability of a zero, in [0, 1); 0 by default.
        seed: int64, determines the mask of dropout, and is required with it.
        out_dtype: y's dtype, by name, of numpy or of torch; None (default) for x's.  "float8_e4m3fn", only with
            channels that are last and without parameters per head, adds a `scale` per row to the result.  bfloat16
            and float8 need ml_dtypes, except for a torch x.
        stats: whether to return `mean` and `rstd`, float32 [...], or [B, *spatial] with layout="nchw", too; False
            by default.
        layer: name of a registered layer, in place of weight, bias, eps, weight_offset, activation and
            negative_slope.
        timeout_ms: milliseconds from the request's arrival at the server in which execution must begin; None
            (default) for the default limit of the server.

    Returns:
        ForwardResult[T]: y in x's shape; residual_out with a residual; mean and rstd with `stats`; scale, float32
            [...], with a float8 y; and `timing`.  All are tensors of x's kind, on x's device.

    Raises:
        TypeError: an argument is neither a tensor nor a list of tensors, or has another dtype.
        ValueError: tensors of a list do not fit together, over shared memory.
        InvalidRequestError: the server refuses a shape, a dtype or an option; `code` and `detail` have the cause.
        UnknownLayerError: no layer of that name is registered.
        DeadlineExceededError: `timeout_ms` passed before execution began.
        ClientError: any other failure, after all retries.

    Examples:
        >>> import numpy as np
        >>> from normserve.client import Client
        >>> x = np.random.rand(8, 1024).astype(np.float32)
        >>> weight, bias = np.ones(1024, np.float32), np.zeros(1024, np.float32)
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     result = client.layer_norm(x, weight, bias, activation="silu")
        >>> result.y.shape
        (8, 1024)
    """
    return make_forward_call("layer_norm", x, locals())


def rms_norm(
    x: T,
    weight: TensorLike | None = None,
    *,
    layout: Literal["nchw", "nhwc"] | None = None,
    residual: Tensors | None = None,
    scale: Tensors | None = None,
    shift: Tensors | None = None,
    gate: Tensors | None = None,
    eps: float | None = None,
    weight_offset: float | None = None,
    activation: ActivationName | None = None,
    negative_slope: float | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    out_dtype: object = None,
    stats: bool | None = None,
    layer: str | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[ForwardResult[T]]:
    """Compute RMSNorm over the last axis on the server.

    y = dropout(act(z * (1 + scale) + shift)), z = w * h / sqrt(mean(h^2) + eps), h = residual + gate * x, w =
    weight + weight_offset.  The method of `AsyncClient` is a coroutine with these arguments, to be awaited.

    Args:
        x: [..., N], or [B, C, *spatial] with layout="nchw", float32, float16 or bfloat16: an array of any library
            (on a CPU or a GPU) or a `HostTensor`.  Or a list of such tensors that share parameters, differ only in
            the size of the first axis and have at least two axes: then every argument with a value per row is a
            list, too, and so are such results.
        weight: [N], any of these dtypes; None (default) for ones.  [H, N] for a separate weight per head of x
            [..., H, N].  [C] with layout="nchw".
        layout: "nhwc" (default) for a norm over the last axis of x; "nchw" for one over the channels of x [B, C,
            *spatial], at each position.
        residual: x's shape, any of these dtypes; None (default) for none.  The sum h is returned as
            `residual_out`, in the residual's dtype.
        scale, shift: a row for each sample, any of these dtypes: the shape of leading axes of x and of its last,
            [B, N] for x [B, tokens, N], with axes of one element between or without, or [B, C]
            with layout="nchw"; None (default) for zeros.
        gate: the factor of x in each sample, shaped as scale, any of these dtypes; None (default) for ones.  It
            needs a residual.
        eps: added to the mean of squares; above 0; None (default) for 1e-6.
        weight_offset: 0 (default), or 1 for a weight that is stored around zero.
        activation: "none" (default), "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; 0.01 by default.  Only it takes another.
        dropout: probability of a zero, in [0, 1); 0 by default.
        seed: int64, determines the mask of dropout, and is required with it.
        out_dtype: y's dtype, by name, of numpy or of torch; None (default) for x's.  "float8_e4m3fn", only with
            channels that are last and without parameters per head, adds a `scale` per row to the result.  bfloat16
            and float8 need ml_dtypes, except for a torch x.
        stats: whether to return `rstd`, float32 [...], or [B, *spatial] with layout="nchw", too; False by default.
        layer: name of a registered layer, in place of weight, eps, weight_offset, activation and negative_slope.
        timeout_ms: milliseconds from the request's arrival at the server in which execution must begin; None
            (default) for the default limit of the server.

    Returns:
        ForwardResult[T]: y in x's shape; residual_out with a residual; rstd with `stats`; scale, float32 [...],
            with a float8 y; and `timing`.  All are tensors of x's kind, on x's device.

    Raises:
        TypeError: an argument is neither a tensor nor a list of tensors, or has another dtype.
        ValueError: tensors of a list do not fit together, over shared memory.
        InvalidRequestError: the server refuses a shape, a dtype or an option; `code` and `detail` have the cause.
        UnknownLayerError: no layer of that name is registered.
        DeadlineExceededError: `timeout_ms` passed before execution began.
        ClientError: any other failure, after all retries.

    Examples:
        >>> import numpy as np
        >>> from normserve.client import Client
        >>> x, weight = np.random.rand(8, 1024).astype(np.float32), np.ones(1024, np.float32)
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     result = client.rms_norm(x, weight, eps=1e-6)
        >>> result.y.shape
        (8, 1024)
    """
    return make_forward_call("rms_norm", x, locals())


def group_norm(
    x: T,
    num_groups: int | None = None,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    layout: Literal["nchw", "nhwc"] | None = None,
    residual: Tensors | None = None,
    scale: Tensors | None = None,
    shift: Tensors | None = None,
    eps: float | None = None,
    activation: ActivationName | None = None,
    negative_slope: float | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    out_dtype: object = None,
    stats: bool | None = None,
    layer: str | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[ForwardResult[T]]:
    """Compute GroupNorm over groups of channels on the server.

    y = dropout(act(z * (1 + scale) + shift)), z = (h - mean) / sqrt(var + eps) * weight + bias, h = x + residual,
    with the mean and the variance of each group of C / num_groups channels in a sample.  The method of
    `AsyncClient` is a coroutine with these arguments, to be awaited.

    Args:
        x: [B, C, *spatial], or [B, *spatial, C] with layout="nhwc", float32, float16 or bfloat16: an array of any
            library (on a CPU or a GPU) or a `HostTensor`.  Or a list of such tensors that share parameters, differ
            only in the size of the first axis and have at least two axes: then every argument with a value per
            sample is a list, too, and so are such results.
        num_groups: divides C; None (default) only with `layer`.
        weight, bias: [C], any of these dtypes; None (default) for ones and zeros.
        layout: "nchw" (default) or "nhwc": the position of the channel axis in x.
        residual: x's shape, any of these dtypes; None (default) for none.  The sum h is returned as
            `residual_out`, in x's dtype.
        scale, shift: [B, C] in either layout, any of these dtypes; None (default) for zeros.
        eps: added to the variance; above 0; None (default) for 1e-5.
        activation: "none" (default), "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; 0.01 by default.  Only it takes another.
        dropout: probability of a zero, in [0, 1); 0 by default.
        seed: int64, determines the mask of dropout, and is required with it.
        out_dtype: y's dtype, float32, float16 or bfloat16, by name, of numpy or of torch; None (default) for x's.
            bfloat16 needs ml_dtypes, except for a torch x.
        stats: whether to return `mean` and `rstd`, float32 [B, num_groups], too; False by default.
        layer: name of a registered layer, in place of num_groups, weight, bias, eps, activation and negative_slope.
        timeout_ms: milliseconds from the request's arrival at the server in which execution must begin; None
            (default) for the default limit of the server.

    Returns:
        ForwardResult[T]: y in x's shape; residual_out with a residual; mean and rstd with `stats`; and `timing`.
            All are tensors of x's kind, on x's device.

    Raises:
        TypeError: an argument is neither a tensor nor a list of tensors, or has another dtype.
        ValueError: tensors of a list do not fit together, over shared memory.
        InvalidRequestError: the server refuses a shape, a dtype or an option; `code` and `detail` have the cause.
        UnknownLayerError: no layer of that name is registered.
        DeadlineExceededError: `timeout_ms` passed before execution began.
        ClientError: any other failure, after all retries.

    Examples:
        >>> import numpy as np
        >>> from normserve.client import Client
        >>> x = np.random.rand(2, 64, 16, 16).astype(np.float32)
        >>> weight, bias = np.ones(64, np.float32), np.zeros(64, np.float32)
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     result = client.group_norm(x, 32, weight, bias, activation="silu")
        >>> result.y.shape
        (2, 64, 16, 16)
    """
    return make_forward_call("group_norm", x, locals())


def layer_norm_chain(
    x: T,
    weights: Sequence[TensorLike | None] = (),
    biases: Sequence[TensorLike | None] = (),
    *,
    eps: float | None = None,
    out_dtype: object = None,
    layers: Sequence[str] | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[ForwardResult[T]]:
    """Compute up to 8 consecutive LayerNorms over the last axis on the server, in one pass over x.

    y = LN_k(... LN_2(LN_1(x))), LN_i(h) = (h - mean(h)) / sqrt(var(h) + eps) * weights[i] + biases[i].  The values
    between two norms stay float32.  There is no backward pass.  The method of `AsyncClient` is a coroutine with
    these arguments, to be awaited.

    Args:
        x: [..., N], float32, float16 or bfloat16: an array of any library (on a CPU or a GPU) or a `HostTensor`.
            Or a list of such tensors that differ only in the size of the first axis and have at least two axes;
            then y is a list, too.
        weights: of 1 to 8 norms, each [N], any of these dtypes; None, or a shorter sequence, for norms without a
            weight.  The last norm needs a weight or a bias.
        biases: of the same norms, each [N], any of these dtypes; None, or a shorter sequence, for norms without a
            bias.
        eps: added to each variance; above 0; None (default) for 1e-5.
        out_dtype: y's dtype, float32, float16 or bfloat16, by name, of numpy or of torch; None (default) for x's.
            bfloat16 needs ml_dtypes, except for a torch x.
        layers: names of registered layers of layer_norm, of one size and eps, in place of weights, biases and eps.
        timeout_ms: milliseconds from the request's arrival at the server in which execution must begin; None
            (default) for the default limit of the server.

    Returns:
        ForwardResult[T]: y in x's shape, a tensor of x's kind, on x's device; and `timing`.

    Raises:
        TypeError: an argument is neither a tensor nor a list of tensors, or has another dtype; layers is a str.
        ValueError: tensors of a list do not fit together, over shared memory.
        InvalidRequestError: the server refuses a shape, a dtype or an option; `code` and `detail` have the cause.
        UnknownLayerError: no layer of that name is registered.
        DeadlineExceededError: `timeout_ms` passed before execution began.
        ClientError: any other failure, after all retries.

    Examples:
        >>> import numpy as np
        >>> from normserve.client import Client
        >>> x = np.random.rand(8, 1024).astype(np.float32)
        >>> weight, bias = np.ones(1024, np.float32), np.zeros(1024, np.float32)
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     result = client.layer_norm_chain(x, [weight, weight], [bias])
        >>> result.y.shape
        (8, 1024)
    """
    arguments = dict(locals())
    if isinstance(layers, str):
        raise TypeError(f"layers must be a list of names, got the str {layers!r}; [{layers!r}] is a list of one")
    for name, plural in zip(PARAMETERS, ("weights", "biases"), strict=True):
        arguments |= {f"{name}.{norm}": each for norm, each in enumerate(arguments.pop(plural))}
    return make_forward_call("layer_norm_chain", x, arguments | {"layers": layers and ",".join(layers)})


def layer_norm_backward(
    dy: Tensors,
    x: T,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    layout: Literal["nchw", "nhwc"] | None = None,
    mean: Tensors | None = None,
    rstd: Tensors | None = None,
    residual: Tensors | None = None,
    dresidual_out: Tensors | None = None,
    scale: Tensors | None = None,
    shift: Tensors | None = None,
    gate: Tensors | None = None,
    eps: float | None = None,
    weight_offset: float | None = None,
    activation: ActivationName | None = None,
    negative_slope: float | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    layer: str | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[BackwardResult[T]]:
    """Compute the gradients of LayerNorm's arguments on the server.

    dh = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + dresidual_out, dx = gate * dh, dresidual = dh, f = 1 +
    scale, g = dz * f * w, w = weight + weight_offset, where dz is the gradient before activation and dropout;
    dweight = sum(dz * f * x_hat), dbias = sum(dz * f); over each sample's rows dscale = sum(dz * (x_hat * w +
    bias)), dshift = sum(dz), dgate = sum(dh * x).  The method of `AsyncClient` is a coroutine with these arguments,
    to be awaited.

    Args:
        dy: gradient of y: x's shape, float32, float16 or bfloat16; a list if x is a list.
        x: the forward call's: [..., N], or [B, C, *spatial] with layout="nchw", float32, float16 or bfloat16, an
            array of any library (on a CPU or a GPU) or a `HostTensor`.  A list if forward had one; then each
            argument with a value per row is a list, too.
        weight, bias: the forward call's: [N] or [H, N], or [C] with layout="nchw"; None (default) for none.
        layout: the forward call's: "nhwc" (default) or "nchw", the position of the channel axis in x.
        mean, rstd: the forward call's results with `stats`, float32 [...], or [B, *spatial] with layout="nchw",
            both or neither; None (default) computes them again.
        residual: the forward call's: x's shape, any of these dtypes, or None (default).
        dresidual_out: gradient of `residual_out`, added to dh: x's shape; None (default) for zeros.
        scale, shift, gate: the forward call's, or None (default).
        eps: added to the variance; above 0; None (default) for 1e-5.
        weight_offset: 0 (default), or 1 for a weight that is stored around zero.
        activation: "none" (default), "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; 0.01 by default.  Only it takes another.
        dropout, seed: the forward call's; 0 and None by default.
        layer: name of a registered layer, in place of weight, bias, eps, weight_offset, activation and
            negative_slope; one with parameters [H, N] raises UnexpectedAnswerError: pass these as arguments.
        timeout_ms: milliseconds from the request's arrival at the server in which execution must begin; None
            (default) for the default limit of the server.

    Returns:
        BackwardResult[T]: dx in x's shape and dtype; dweight, dbias, dscale, dshift and dgate in their tensors'
            dtypes; dresidual, only with a gate or if the residual's dtype is not x's; and `timing`.  Each is a
            tensor of the same kind as its argument; gradients of a registered layer's parameters are of x's kind.

    Raises:
        TypeError: an argument is neither a tensor nor a list of tensors, or has another dtype.
        ValueError: tensors of a list do not fit together, over shared memory.
        InvalidRequestError: the server refuses a shape, a dtype or an option; `code` and `detail` have the cause.
        UnknownLayerError: no layer of that name is registered.
        DeadlineExceededError: `timeout_ms` passed before execution began.
        ClientError: any other failure, after all retries.

    Examples:
        >>> import numpy as np
        >>> from normserve.client import Client
        >>> x = np.random.rand(8, 1024).astype(np.float32)
        >>> weight, bias = np.ones(1024, np.float32), np.zeros(1024, np.float32)
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     gradients = client.layer_norm_backward(np.ones_like(x), x, weight, bias)
        >>> gradients.dx.shape, gradients.dweight.shape
        ((8, 1024), (1024,))
    """
    return make_backward_call("layer_norm", x, locals())


def rms_norm_backward(
    dy: Tensors,
    x: T,
    weight: TensorLike | None = None,
    *,
    layout: Literal["nchw", "nhwc"] | None = None,
    rstd: Tensors | None = None,
    residual: Tensors | None = None,
    dresidual_out: Tensors | None = None,
    scale: Tensors | None = None,
    shift: Tensors | None = None,
    gate: Tensors | None = None,
    eps: float | None = None,
    weight_offset: float | None = None,
    activation: ActivationName | None = None,
    negative_slope: float | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    layer: str | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[BackwardResult[T]]:
    """Compute the gradients of RMSNorm's arguments on the server.

    dh = rstd * (g - x_hat * mean(g * x_hat)) + dresidual_out, dx = gate * dh, dresidual = dh, f = 1 + scale, g = dz
    * f * w, w = weight + weight_offset, x_hat = h * rstd, where dz is the gradient before activation and dropout;
    dweight = sum(dz * f * x_hat); over each sample's rows dscale = sum(dz * x_hat * w), dshift = sum(dz), dgate =
    sum(dh * x).  The method of `AsyncClient` is a coroutine with these arguments, to be awaited.

    Args:
        dy: gradient of y: x's shape, float32, float16 or bfloat16; a list if x is a list.
        x: the forward call's: [..., N], or [B, C, *spatial] with layout="nchw", float32, float16 or bfloat16, an
            array of any library (on a CPU or a GPU) or a `HostTensor`.  A list if forward had one; then each
            argument with a value per row is a list, too.
        weight: the forward call's: [N] or [H, N], or [C] with layout="nchw"; None (default) for none.
        layout: the forward call's: "nhwc" (default) or "nchw", the position of the channel axis in x.
        rstd: the forward call's result with `stats`, float32 [...], or [B, *spatial] with layout="nchw"; None
            (default) computes it again.
        residual: the forward call's: x's shape, any of these dtypes, or None (default).
        dresidual_out: gradient of `residual_out`, added to dh: x's shape; None (default) for zeros.
        scale, shift, gate: the forward call's, or None (default).
        eps: added to the mean of squares; above 0; None (default) for 1e-6.
        weight_offset: 0 (default), or 1 for a weight that is stored around zero.
        activation: "none" (default), "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; 0.01 by default.  Only it takes another.
        dropout, seed: the forward call's; 0 and None by default.
        layer: name of a registered layer, in place of weight, eps, weight_offset, activation and negative_slope;
            one with parameters [H, N] raises UnexpectedAnswerError: pass these as arguments.
        timeout_ms: milliseconds from the request's arrival at the server in which execution must begin; None
            (default) for the default limit of the server.

    Returns:
        BackwardResult[T]: dx in x's shape and dtype; dweight, dscale, dshift and dgate in their tensors' dtypes;
            dresidual, only with a gate or if the residual's dtype is not x's; and `timing`.  Each is a tensor of
            the same kind as its argument; gradients of a registered layer's parameters are of x's kind.

    Raises:
        TypeError: an argument is neither a tensor nor a list of tensors, or has another dtype.
        ValueError: tensors of a list do not fit together, over shared memory.
        InvalidRequestError: the server refuses a shape, a dtype or an option; `code` and `detail` have the cause.
        UnknownLayerError: no layer of that name is registered.
        DeadlineExceededError: `timeout_ms` passed before execution began.
        ClientError: any other failure, after all retries.

    Examples:
        >>> import numpy as np
        >>> from normserve.client import Client
        >>> x, weight = np.random.rand(8, 1024).astype(np.float32), np.ones(1024, np.float32)
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     gradients = client.rms_norm_backward(np.ones_like(x), x, weight)
        >>> gradients.dx.shape, gradients.dweight.shape
        ((8, 1024), (1024,))
    """
    return make_backward_call("rms_norm", x, locals())


def group_norm_backward(
    dy: Tensors,
    x: T,
    num_groups: int | None = None,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    layout: Literal["nchw", "nhwc"] | None = None,
    mean: Tensors | None = None,
    rstd: Tensors | None = None,
    residual: Tensors | None = None,
    dresidual_out: Tensors | None = None,
    scale: Tensors | None = None,
    shift: Tensors | None = None,
    eps: float | None = None,
    activation: ActivationName | None = None,
    negative_slope: float | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    layer: str | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[BackwardResult[T]]:
    """Compute the gradients of GroupNorm's arguments on the server.

    dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + dresidual_out over groups, f = 1 + scale, g = dz * f *
    weight, where dz is the gradient before activation and dropout; dshift = sum(dz), dscale = sum(dz * (x_hat *
    weight + bias)), dbias = sum(dz * f), dweight = sum(dz * f * x_hat).  The method of `AsyncClient` is a
    coroutine with these arguments, to be awaited.

    Args:
        dy: gradient of y: x's shape, float32, float16 or bfloat16; a list if x is a list.
        x: the forward call's: [B, C, *spatial], or [B, *spatial, C] with layout="nhwc", an array of any library
            (on a CPU or a GPU) or a `HostTensor`.  A list if forward had one; then each argument with a value per
            sample is a list, too.
        num_groups: divides C; None (default) only with `layer`.
        weight, bias: the forward call's: [C], or None (default).
        layout: "nchw" (default) or "nhwc": the position of the channel axis in x.
        mean, rstd: the forward call's results with `stats`, float32 [B, num_groups], both or neither; None
            (default) computes them again.
        residual: the forward call's: x's shape, any of these dtypes, or None (default).
        dresidual_out: gradient of `residual_out`, added to dx: x's shape; None (default) for zeros.
        scale, shift: the forward call's: [B, C], or None (default).
        eps: added to the variance; above 0; None (default) for 1e-5.
        activation: "none" (default), "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh".
        negative_slope: leaky_relu's factor of negative values, finite; 0.01 by default.  Only it takes another.
        dropout, seed: the forward call's; 0 and None by default.
        layer: name of a registered layer, in place of num_groups, weight, bias, eps, activation and negative_slope.
        timeout_ms: milliseconds from the request's arrival at the server in which execution must begin; None
            (default) for the default limit of the server.

    Returns:
        BackwardResult[T]: dx in x's shape and dtype, also the gradient of the residual; dweight, dbias, dscale and
            dshift in their tensors' dtypes; and `timing`.  Each is a tensor of the same kind as its argument;
            gradients of a registered layer's parameters are of x's kind.

    Raises:
        TypeError: an argument is neither a tensor nor a list of tensors, or has another dtype.
        ValueError: tensors of a list do not fit together, over shared memory.
        InvalidRequestError: the server refuses a shape, a dtype or an option; `code` and `detail` have the cause.
        UnknownLayerError: no layer of that name is registered.
        DeadlineExceededError: `timeout_ms` passed before execution began.
        ClientError: any other failure, after all retries.

    Examples:
        >>> import numpy as np
        >>> from normserve.client import Client
        >>> x = np.random.rand(2, 64, 16, 16).astype(np.float32)
        >>> weight, bias = np.ones(64, np.float32), np.zeros(64, np.float32)
        >>> with Client("http://127.0.0.1:8000") as client:
        ...     gradients = client.group_norm_backward(np.ones_like(x), x, 32, weight, bias)
        >>> gradients.dx.shape, gradients.dweight.shape
        ((2, 64, 16, 16), (64,))
    """
    return make_backward_call("group_norm", x, locals())
