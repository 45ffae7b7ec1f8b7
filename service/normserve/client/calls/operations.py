"""The operations: each function turns arguments into a request, and its response into a result.

The functions here are the clients' methods without the sending; the methods take their signatures and texts
from here.  Each hands on its arguments by the names that they have in the HTTP API: those of `_TENSORS` go into the
body, the others into the query.  Parameters that are left out are not sent, so the server's defaults hold.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from normserve.client.answers import expectations
from normserve.client.answers.answer import ApiResponse
from normserve.client.answers.expectations import ExpectedResults
from normserve.client.calls import arrays
from normserve.client.calls.arrays import TensorLike
from normserve.client.calls.call import ApiCall, describe_tensors, make_query
from normserve.client.errors import UnexpectedAnswerError
from normserve.client.results import BackwardResult, ForwardResult
from normserve.codec.activations import ActivationName
from normserve.codec.tensor_names import OF_ROWS, PARAMETERS
from normserve.memory.host_tensors import HostTensor

Tensors = TensorLike | Sequence[TensorLike]
"""A tensor, or a list with one tensor for each of several x."""

T = TypeVar("T", bound=Tensors)

_TENSORS = OF_ROWS.union(PARAMETERS)


def layer_norm(
    x: T,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    residual: Tensors | None = None,
    eps: float | None = None,
    weight_offset: float | None = None,
    activation: ActivationName | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    out_dtype: object = None,
    stats: bool | None = None,
    layer: str | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[ForwardResult[T]]:
    """Compute y = dropout(activation(w * (h - mean(h)) / sqrt(var(h) + eps) + bias)), h = x + residual.

    Args:
        x: [..., N], a numpy array or a torch tensor of float32, float16 or bfloat16, as all tensors here.  Or a
            list of such that share parameters, alike but for the first of at least two axes: then all else that
            has x's shape is a list as well, and so are the results of that shape.
        weight, bias: [N], of any of these types; [H, N] where each head of x [..., H, N] has its own.
        residual: in x's shape, of any of these types; h then comes back as `residual_out`, of the residual's type.
        eps: 1e-5 by default.
        weight_offset: 0, or 1 for a weight that is kept around zero; w is weight + weight_offset.
        activation: "none", "relu", "silu", "gelu" or "gelu_tanh".
        dropout, seed: probability of a zero, and the seed of the mask, required with it.
        out_dtype: of y; x's by default. "float8_e4m3fn", of [N] parameters, comes with a `scale` for each row.
        stats: also return `mean` and `rstd`, [...].
        layer: a registered layer in place of weight, bias, eps, weight_offset and activation.
        timeout_ms: the longest wait on the server from arrival to the start of execution.

    Raises:
        TypeError: an argument is no array, or of no element type of the API.
        ClientError: see `normserve.client.errors`.
    """
    return _make_forward_call("layer_norm", x, locals())


def rms_norm(
    x: T,
    weight: TensorLike | None = None,
    *,
    residual: Tensors | None = None,
    eps: float | None = None,
    weight_offset: float | None = None,
    activation: ActivationName | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    out_dtype: object = None,
    stats: bool | None = None,
    layer: str | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[ForwardResult[T]]:
    """Compute y = dropout(activation(w * h / sqrt(mean(h^2) + eps))), h = x + residual.

    Args: as `layer_norm`, without bias; eps is 1e-6 by default, and `stats` returns `rstd` alone.
    """
    return _make_forward_call("rms_norm", x, locals())


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
    dropout: float | None = None,
    seed: int | None = None,
    out_dtype: object = None,
    stats: bool | None = None,
    layer: str | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[ForwardResult[T]]:
    """Do as `layer_norm` over each of `num_groups` groups of channels and all their positions.

    Args: as `layer_norm`, and
        x: [B, C, *spatial], or [B, *spatial, C] with layout="nhwc".
        num_groups: divides C; left out only with `layer`.
        weight, bias: [C].
        residual: `residual_out` has x's type, whatever the residual's.
        out_dtype: not float8_e4m3fn.
        scale, shift: [B, C] in either layout, each sample's own affine step, z * (1 + scale) + shift, after
            weight and bias.
        layout: "nchw" or "nhwc".
        stats: also return `mean` and `rstd`, [B, num_groups].
    """
    return _make_forward_call("group_norm", x, locals())


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
    """Compute y = LN_k(... LN_2(LN_1(x))), each `layer_norm` with its own weight and bias, in one pass over x.

    The values between two norms stay float32.  There is no backward pass.

    Args:
        x: [..., N], as of `layer_norm`.
        weights, biases: of 1 to 8 norms, each [N], of any of these types; None, or a shorter sequence, for norms
            that have none.  The last norm has one of both.
        eps: of each norm; 1e-5 by default.
        out_dtype: of y; x's by default; not float8_e4m3fn.
        layers: names of registered layers of layer_norm, of one size and eps, in place of weights, biases and eps.
        timeout_ms: as of `layer_norm`.

    Raises:
        TypeError: an argument is no array, or of no element type of the API.
        ClientError: see `normserve.client.errors`.
    """
    arguments = dict(locals())
    for name, plural in zip(PARAMETERS, ("weights", "biases"), strict=True):
        arguments |= {f"{name}.{norm}": each for norm, each in enumerate(arguments.pop(plural))}
    return _make_forward_call("layer_norm_chain", x, arguments | {"layers": layers and ",".join(layers)})


def layer_norm_backward(
    dy: Tensors,
    x: T,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    mean: Tensors | None = None,
    rstd: Tensors | None = None,
    residual: Tensors | None = None,
    dresidual_out: Tensors | None = None,
    eps: float | None = None,
    weight_offset: float | None = None,
    activation: ActivationName | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    layer: str | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[BackwardResult[T]]:
    """Compute the gradients of `layer_norm` from dy and all arguments of the forward call.

    Args: as `layer_norm`, and
        dy: the gradient of y, as x.
        mean, rstd: what forward returned with `stats`; computed anew when left out.
        dresidual_out: the gradient that reached `residual_out` from elsewhere, in x's shape; added to dx.
        layer: of one whose parameters are [H, N], hand in the parameters themselves.
    """
    return _make_backward_call("layer_norm", x, locals())


def rms_norm_backward(
    dy: Tensors,
    x: T,
    weight: TensorLike | None = None,
    *,
    rstd: Tensors | None = None,
    residual: Tensors | None = None,
    dresidual_out: Tensors | None = None,
    eps: float | None = None,
    weight_offset: float | None = None,
    activation: ActivationName | None = None,
    dropout: float | None = None,
    seed: int | None = None,
    layer: str | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[BackwardResult[T]]:
    """Compute the gradients of `rms_norm`.

    Args: as `rms_norm`, and those of `layer_norm_backward` but mean.
    """
    return _make_backward_call("rms_norm", x, locals())


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
    dropout: float | None = None,
    seed: int | None = None,
    layer: str | None = None,
    timeout_ms: float | None = None,
) -> ApiCall[BackwardResult[T]]:
    """Compute the gradients of `group_norm`.

    Args: as `group_norm`, and those of `layer_norm_backward`.
    """
    return _make_backward_call("group_norm", x, locals())


def _make_forward_call(op: str, x: T, arguments: Mapping[str, object]) -> ApiCall[ForwardResult[T]]:
    tensors, params = _split_arguments(arguments)
    if "out_dtype" in params:
        params["out_dtype"] = str(params["out_dtype"]).removeprefix("torch.")
        arrays.check_dtype_support(_get_first_tensor(x), str(params["out_dtype"]))

    sent, asked = describe_tensors(tensors), make_query(params)
    expected = expectations.expect_forward(op, sent, asked)

    def read_result(answer: ApiResponse) -> ForwardResult[T]:
        like = _get_first_tensor(x)
        found = _group_numbered(
            {
                name: arrays.convert_tensor(tensor, like)
                for name, tensor in _read_checked_tensors(answer, expected).items()
            }
        )
        statistics = found.get("mean"), found.get("rstd")
        return ForwardResult(
            found["y"], found.get("residual_out"), *statistics, answer.read_timing(), found.get("scale")
        )

    return ApiCall("POST", f"/v1/{op}", read_result, asked, sent, expected.by_name, max_bytes=expected.max_bytes)


def _make_backward_call(op: str, x: T, arguments: Mapping[str, object]) -> ApiCall[BackwardResult[T]]:
    tensors, params = _split_arguments(arguments)
    sent, asked = describe_tensors(tensors), make_query(params)
    expected = expectations.expect_backward(op, sent, asked)

    def read_result(answer: ApiResponse) -> BackwardResult[T]:
        results = _read_checked_tensors(answer, expected)
        try:
            like = _get_first_tensor(x)
            found = _group_numbered(
                {
                    name: arrays.convert_tensor(tensor, _find_gradient_source(name, like, tensors))
                    for name, tensor in results.items()
                }
            )
        # A registered layer's parameters may be of a type that x's kind of array does not have.
        except TypeError as error:
            raise UnexpectedAnswerError(str(error)) from None
        dweight, dbias, dscale, dshift = (found.get(f"d{name}") for name in ("weight", "bias", "scale", "shift"))
        timing, dresidual = answer.read_timing(), found.get("dresidual")
        return BackwardResult(found["dx"], dweight, dbias, dscale, dshift, timing, dresidual)

    return ApiCall(
        "POST", f"/v1/{op}/backward", read_result, asked, sent, expected.by_name, max_bytes=expected.max_bytes
    )


def _get_first_tensor(x: T) -> Any:
    """Return x, or the first tensor where x is a list of several."""
    return x[0] if isinstance(x, list | tuple) else x


def _group_numbered(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results with numbered ones as lists under one name."""
    found: dict[str, Any] = {}
    for name, tensor in results.items():
        base, dot, _ = name.partition(".")
        if dot:
            found.setdefault(base, []).append(tensor)
        else:
            found[name] = tensor
    return found


def _split_arguments(arguments: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Divide the arguments into tensors and parameters, without those that are None."""
    tensors: dict[str, object] = {}
    params: dict[str, object] = {}
    for name, value in arguments.items():
        if value is not None:
            if isinstance(value, list | tuple):
                tensors |= {f"{name}.{number}": each for number, each in enumerate(value)}
            else:
                (tensors if name.partition(".")[0] in _TENSORS else params)[name] = value
    return tensors, params


def _read_checked_tensors(answer: ApiResponse, expected: ExpectedResults) -> Mapping[str, HostTensor]:
    results = answer.read_tensors()
    expected.check(results)
    return results


def _find_gradient_source(gradient: str, x: object, tensors: Mapping[str, object]) -> object:
    """Return the argument that a gradient belongs to; x for a parameter of a registered layer."""
    owner = tensors.get(gradient.removeprefix("d"))
    return x if owner is None else owner
