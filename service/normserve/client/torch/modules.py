"""The modules, with torch's constructors, state_dict and repr, computed by the service."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from normserve.client.client import Client
from normserve.client.torch.differentiable import normalise
from normserve.codec.api_names import ACTIVATIONS, DEFAULT_SLOPE, ActivationName


class _ClientHolder:
    """An object that holds a module's client.  Copies of the module share the client, and pickles of the module
    omit it.
    """

    def __init__(self, client: Client | None = None) -> None:
        self.client = client

    def __deepcopy__(self, memo: object) -> "_ClientHolder":
        return self

    def __reduce__(self) -> tuple[type["_ClientHolder"], tuple[()]]:
        return _ClientHolder, ()


class _ServiceNormModule(nn.Module):
    """A base class that adds a client, and an activation after the norm, to a torch norm module.

    It precedes torch's class among the bases.
    """

    #: Added to the weight; used only by modules that normalise over the last axes.
    weight_offset: float = 0.0

    #: None for the last axes, or "nchw" for the channels of [N, C, *spatial]; used only by modules of rows.
    layout: str | None = None

    #: leaky_relu's factor of negative values; here for modules that an earlier version pickled.
    negative_slope: float = DEFAULT_SLOPE
    _client_holder: _ClientHolder

    def __init__(
        self, *args: Any, client: Client, activation: ActivationName | None, negative_slope: float, **kwargs: Any
    ) -> None:
        activation = "none" if activation is None else activation
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if negative_slope != DEFAULT_SLOPE and activation != "leaky_relu":
            raise ValueError(f"negative_slope needs activation leaky_relu, got {activation!r}")
        if not math.isfinite(negative_slope):
            raise ValueError(f"negative_slope must be a finite number, got {negative_slope!r}")
        super().__init__(*args, **kwargs)
        self.activation, self.negative_slope = activation, negative_slope
        self.client = client

    @property
    def client(self) -> Client:
        """The client that sends the module's calls to the server.

        Raises:
            RuntimeError: there is no client, because the module was unpickled.
        """
        client = self._client_holder.client
        if client is None:
            raise RuntimeError(
                f"{type(self).__name__} has no client, which pickling leaves behind: set the module's `client`"
            )
        return client

    @client.setter
    def client(self, client: Client) -> None:
        if not isinstance(client, Client):
            raise TypeError(f"client must be a normserve.client.Client, got {type(client).__name__}")
        self._client_holder = _ClientHolder(client)

    def extra_repr(self) -> str:
        """Return torch's text, followed by the options that torch's module does not have.

        Returns:
            str: the text between the parentheses of the module's repr.
        """
        text = super().extra_repr()
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset}"
        if self.layout is not None:
            text += f", layout={self.layout!r}"
        if self.activation != "none":
            text += f", activation={self.activation!r}"
        return text if self.activation != "leaky_relu" else f"{text}, negative_slope={self.negative_slope}"

    def _make_options(self, eps: float) -> dict[str, object]:
        options: dict[str, object] = {"eps": eps, "activation": self.activation}
        return options if self.activation != "leaky_relu" else options | {"negative_slope": self.negative_slope}


class _ServiceRowModule(_ServiceNormModule):
    """The base class of `LayerNorm` and `RMSNorm`, which normalise over the last axes, or over channels."""

    normalized_shape: tuple[int, ...]

    def __init__(self, *args: Any, weight_offset: float, layout: str | None, **kwargs: Any) -> None:
        if layout not in (None, "nchw"):
            raise ValueError(f"layout must be None or 'nchw', got {layout!r}")
        # Before torch's constructor, which resets the parameters.
        self.weight_offset = weight_offset
        super().__init__(*args, **kwargs)
        self.layout = layout
        _check_weight_offset(weight_offset, self._parameters["weight"])
        if layout is not None and len(self.normalized_shape) != 1:
            shape = list(self.normalized_shape)
            raise ValueError(f"layout {layout!r} needs a normalized_shape of one axis, C, got {shape}")

    def reset_parameters(self) -> None:
        """Set the weight to 1 - weight_offset and the bias to 0, with the same effect as torch's initial values."""
        for name, parameter in self.named_parameters(recurse=False):
            nn.init.constant_(parameter, 1.0 - self.weight_offset if name == "weight" else 0.0)

    def _normalise_rows(
        self,
        operation: str,
        x: Tensor,
        eps: float,
        scale: Tensor | None,
        shift: Tensor | None,
        **parameters: Tensor | None,
    ) -> Tensor:
        """Compute a norm over the last axes, which are flattened to one axis for the server, or over channels.

        Args:
            operation: the name of the client's method.
            scale, shift: of the samples, in axes of x that lead and its last axes, or with a layout [N, C].
            parameters: weight and, for LayerNorm, bias.
        """
        _check_tensors(x=x, scale=scale, shift=shift)
        shape, options = self.normalized_shape, self._make_options(eps)
        if self.weight_offset:
            options["weight_offset"] = self.weight_offset
        if self.layout is not None:
            return self._normalise_channels(operation, options, x, *parameters.values(), scale, shift)
        inputs = [
            _flatten_rows("x", x, shape),
            *[_flatten_parameter(name, each, shape) for name, each in parameters.items()],
            None if scale is None else _flatten_rows("scale", scale, shape),
            None if shift is None else _flatten_rows("shift", shift, shape),
        ]
        y = normalise(self.client, operation, options, *inputs)
        return y if len(shape) == 1 else y.view(x.shape)

    def _normalise_channels(
        self, operation: str, options: dict[str, object], x: Tensor, *inputs: Tensor | None
    ) -> Tensor:
        """Compute a norm over the channels of x [N, C, *spatial]; if they are last in memory, as rows."""
        if x.dim() < 2 or x.shape[1:2] != self.normalized_shape:
            raise ValueError(f"x must be [N, {self.normalized_shape[0]}, *spatial], got {list(x.shape)}")
        if _is_channels_last(x):
            return normalise(self.client, operation, options, x.movedim(1, -1), *inputs).movedim(-1, 1)
        return normalise(self.client, operation, options | {"layout": self.layout}, x, *inputs)


class LayerNorm(_ServiceRowModule, nn.LayerNorm):
    """A `torch.nn.LayerNorm` that the service computes, with an activation after the norm.

    y = act(z * (1 + scale) + shift), z = (x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias, with the
    mean and the biased variance over the last axes.  scale and shift are optional arguments of the call.

    Parameters, their names, state_dict and initial values are those of `torch.nn.LayerNorm`; they are sent with
    each call.  Tensors may be CPU or GPU tensors.  First derivatives are computed by the server, second ones are
    refused (RuntimeError).

    Args:
        normalized_shape: an int or a sequence of ints: the sizes of the last axes, over which the module
            normalises.
        eps: added to the variance; default 1e-5.
        elementwise_affine: whether the module has parameters of normalized_shape; default True.
        bias: whether there is a bias beside the weight; default True.
        device, dtype: of the parameters; None (default) for torch's defaults.
        client: a `Client`, which sends the calls; modules and threads may share one.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh", applied
            to the output.
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        weight_offset: added to the weight: 0 (default), or 1 for a weight that is kept around zero and starts
            there.
        layout: None (default) for a norm over the last axes; "nchw" for one over the channels of an input [N, C,
            *spatial], as models' LayerNorm2d, with normalized_shape C.

    Raises:
        ValueError: activation, weight_offset or layout is none of these, weight_offset is 1 without a weight,
            negative_slope is invalid, or normalized_shape has several axes with a layout.
        TypeError: client is not a `Client`.

    Examples:
        >>> import torch
        >>> from normserve.client import Client
        >>> from normserve.client.torch import LayerNorm
        >>> client = Client("http://127.0.0.1:8000")
        >>> norm = LayerNorm(1024, client=client)
        >>> norm(torch.randn(8, 1024)).shape
        torch.Size([8, 1024])
        >>> client.close()
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        client: Client,
        activation: ActivationName | None = "none",
        negative_slope: float = DEFAULT_SLOPE,
        weight_offset: float = 0.0,
        layout: Literal["nchw"] | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            bias,
            device,
            dtype,
            client=client,
            activation=activation,
            negative_slope=negative_slope,
            weight_offset=weight_offset,
            layout=layout,
        )

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor: ...

    def forward(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Normalise the input over its last axes, or with a layout over its channels.

        Args:
            input: [..., *normalized_shape], or [N, C, *spatial] with a layout, float32, float16 or bfloat16.
            scale, shift: the affine step per sample, y = act(z * (1 + scale) + shift): the shape of leading axes of
                input and normalized_shape, as [N, *normalized_shape]; [N, C] with a layout; None (default) for
                zeros.

        Returns:
            Tensor: in the input's shape and dtype, with a layout channels-last if the input is; float32 under
                CUDA's autocast.

        Raises:
            ValueError: input, scale, shift or a parameter has other last axes, or with a layout another C.
            TypeError: input, scale or shift is no torch tensor, or one of them or a parameter has another dtype.
            ClientError: the server refuses the request or does not respond, after all retries; also in backward.
            RuntimeError: the module has no client, because it was unpickled; or `torch.jit.trace` records the
                call.
        """
        return self._normalise_rows("layer_norm", input, self.eps, scale, shift, weight=self.weight, bias=self.bias)


class RMSNorm(_ServiceRowModule, nn.RMSNorm):
    """A `torch.nn.RMSNorm` that the service computes, with an activation after the norm.

    y = act(z * (1 + scale) + shift), z = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), with the mean over
    the last axes.  scale and shift are optional arguments of the call.

    Parameters, their names, state_dict and initial values are those of `torch.nn.RMSNorm`; they are sent with each
    call.  Tensors may be CPU or GPU tensors.  First derivatives are computed by the server, second ones are
    refused (RuntimeError).

    Args:
        normalized_shape: an int or a sequence of ints: the sizes of the last axes, over which the module
            normalises.
        eps: added to the mean of squares; None (default) for the machine epsilon of float32, in which the service
            computes.
        elementwise_affine: whether the module has parameters of normalized_shape; default True.
        device, dtype: of the parameters; None (default) for torch's defaults.
        client: a `Client`, which sends the calls; modules and threads may share one.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh", applied
            to the output.
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.
        weight_offset: added to the weight: 0 (default), or 1 for a weight that is kept around zero and starts
            there.
        layout: None (default) for a norm over the last axes; "nchw" for one over the channels of an input [N, C,
            *spatial], as models' LayerNorm2d, with normalized_shape C.

    Raises:
        ValueError: activation, weight_offset or layout is none of these, weight_offset is 1 without a weight,
            negative_slope is invalid, or normalized_shape has several axes with a layout.
        TypeError: client is not a `Client`.

    Examples:
        >>> import torch
        >>> from normserve.client import Client
        >>> from normserve.client.torch import RMSNorm
        >>> client = Client("http://127.0.0.1:8000")
        >>> norm = RMSNorm(1024, client=client)
        >>> norm(torch.randn(8, 1024)).shape
        torch.Size([8, 1024])
        >>> client.close()
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        client: Client,
        activation: ActivationName | None = "none",
        negative_slope: float = DEFAULT_SLOPE,
        weight_offset: float = 0.0,
        layout: Literal["nchw"] | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            device,
            dtype,
            client=client,
            activation=activation,
            negative_slope=negative_slope,
            weight_offset=weight_offset,
            layout=layout,
        )

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor: ...

    def forward(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Normalise x over its last axes, or with a layout over its channels.

        Args:
            x: [..., *normalized_shape], or [N, C, *spatial] with a layout, float32, float16 or bfloat16.
            scale, shift: the affine step per sample, y = act(z * (1 + scale) + shift): the shape of leading axes of
                x and normalized_shape, as [N, *normalized_shape]; [N, C] with a layout; None (default) for zeros.

        Returns:
            Tensor: in x's shape and dtype, with a layout channels-last if x is; under CUDA's autocast in the dtype
                of torch's module.

        Raises:
            ValueError: x, scale, shift or a parameter has other last axes, or with a layout another C.
            TypeError: x, scale or shift is no torch tensor, or one of them or a parameter has another dtype.
            ClientError: the server refuses the request or does not respond, after all retries; also in backward.
            RuntimeError: the module has no client, because it was unpickled; or `torch.jit.trace` records the
                call.
        """
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return self._normalise_rows("rms_norm", x, eps, scale, shift, weight=self.weight)


class GroupNorm(_ServiceNormModule, nn.GroupNorm):
    """A `torch.nn.GroupNorm` that the service computes, with an activation after the norm.

    y = act(z * (1 + scale) + shift), z = (x - mean) / sqrt(var + eps) * weight + bias, with the mean and the
    biased variance of each group of channels in a sample.  scale and shift are optional arguments of the call.

    Parameters, their names, state_dict and initial values are those of `torch.nn.GroupNorm`; they are sent with
    each call.  Tensors may be CPU or GPU tensors.  First derivatives are computed by the server, second ones are
    refused (RuntimeError).

    Args:
        num_groups: number of groups; it divides num_channels.
        num_channels: C, the size of the input's second axis.
        eps: added to the variance; default 1e-5.
        affine: whether the module has a weight and a bias [C]; default True.
        device, dtype: of the parameters; None (default) for torch's defaults.
        bias: whether there is a bias beside the weight; default True.  False needs a torch whose GroupNorm has
            this argument (2.13).
        client: a `Client`, which sends the calls; modules and threads may share one.
        activation: "none" (default) or None, "relu", "leaky_relu", "silu", "gelu" (by erf) or "gelu_tanh", applied
            to the output.
        negative_slope: leaky_relu's factor of negative values, finite; default 0.01.  Only it takes another.

    Raises:
        ValueError: activation is none of these, negative_slope is invalid, or num_groups does not divide
            num_channels.
        TypeError: client is not a `Client`; or bias is False, and torch's GroupNorm does not have it.

    Examples:
        >>> import torch
        >>> from normserve.client import Client
        >>> from normserve.client.torch import GroupNorm
        >>> client = Client("http://127.0.0.1:8000")
        >>> norm = GroupNorm(32, 64, client=client)
        >>> norm(torch.randn(2, 64, 16, 16)).shape
        torch.Size([2, 64, 16, 16])
        >>> client.close()
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        client: Client,
        activation: ActivationName | None = "none",
        negative_slope: float = DEFAULT_SLOPE,
    ) -> None:
        of_bias = {} if bias else {"bias": bias}
        super().__init__(
            num_groups,
            num_channels,
            eps,
            affine,
            device,
            dtype,
            client=client,
            activation=activation,
            negative_slope=negative_slope,
            **of_bias,
        )

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor: ...

    def forward(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Normalise the input over groups of channels.

        Args:
            input: [N, C, *spatial], float32, float16 or bfloat16; contiguous or channels-last.
            scale, shift: [N, C], the affine step per sample, y = act(z * (1 + scale) + shift); None (default) for
                zeros.

        Returns:
            Tensor: in the input's shape, dtype and layout; float32 under CUDA's autocast.

        Raises:
            TypeError: input, scale or shift is no torch tensor, or one of them or a parameter has another dtype.
            ClientError: the server refuses the request or does not respond, after all retries; also in backward.
            RuntimeError: the module has no client, because it was unpickled; or `torch.jit.trace` records the
                call.
        """
        _check_tensors(x=input, scale=scale, shift=shift)
        x = input
        is_channels_last = _is_channels_last(x)
        options = self._make_options(self.eps)
        options |= {"num_groups": self.num_groups, "layout": "nhwc" if is_channels_last else "nchw"}
        if is_channels_last:
            x = x.movedim(1, -1)
        y = normalise(self.client, "group_norm", options, x, self.weight, self.bias, scale, shift)
        return y.movedim(-1, 1) if is_channels_last else y


def _check_tensors(**inputs: object) -> None:
    """Raise TypeError unless each input of a call is a torch tensor, or None except for x.

    The message says what to write for an array of another library or a list.
    """
    for name, value in inputs.items():
        is_required = name == "x"
        if isinstance(value, Tensor) or (value is None and not is_required):
            continue
        expected = "a torch tensor" if is_required else "a torch tensor or None"
        remedy = ""
        if hasattr(value, "__dlpack__"):
            remedy = f": torch.from_dlpack({name}) makes one"
        elif isinstance(value, list | tuple):
            remedy = f": torch.tensor({name}, dtype=torch.float32) makes one"
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}{remedy}")


def _is_channels_last(x: Tensor) -> bool:
    """Return whether x [N, C, *spatial] is stored as [N, *spatial, C], and is not contiguous."""
    return x.dim() > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def _flatten_rows(name: str, x: Tensor, normalized_shape: tuple[int, ...]) -> Tensor:
    """Flatten the last axes of x or of another tensor, those to normalise over, to one axis.

    Raises:
        ValueError: its last axes are not normalized_shape.
    """
    axes = len(normalized_shape)
    if not axes or x.shape[-axes:] != normalized_shape:
        raise ValueError(
            f"{name} must end in normalized_shape {list(normalized_shape)}, of at least one axis, "
            f"got {list(x.shape)}"
        )
    return x if axes == 1 else x.flatten(-axes)


def _flatten_parameter(name: str, parameter: Tensor | None, normalized_shape: tuple[int, ...]) -> Tensor | None:
    """Flatten a parameter to one axis; return None for None.

    Raises:
        ValueError: the parameter's shape is not normalized_shape.
    """
    if parameter is None:
        return None
    if parameter.shape != normalized_shape:
        raise ValueError(f"{name} must be {list(normalized_shape)}, got {list(parameter.shape)}")
    return parameter if len(normalized_shape) == 1 else parameter.flatten()


def _check_weight_offset(weight_offset: float, weight: Tensor | None) -> None:
    """Raise ValueError unless the offset is 0 or 1, and 0 for a module without a weight."""
    if weight_offset not in (0.0, 1.0):
        raise ValueError(f"weight_offset must be 0 or 1, got {weight_offset}")
    if weight_offset and weight is None:
        raise ValueError("weight_offset needs a weight, got None")
