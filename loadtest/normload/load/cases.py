"""The description of a request, from which its tensors are computed."""

from dataclasses import dataclass

import numpy as np
from normserve.client import DType, HostTensor

from normload.load.elements import narrow

OPERATIONS = (
    "layer_norm",
    "rms_norm",
    "group_norm",
    "layer_norm/backward",
    "rms_norm/backward",
    "group_norm/backward",
    "layer_norm_chain",
)
ACTIVATIONS = ("none", "silu", "gelu_tanh")
LAYOUTS = ("nchw", "nhwc")


@dataclass(frozen=True, slots=True)
class Case:
    """The description of a request; its values follow from `seed`.

    Attributes:
        operation: as in the API's path, such as "layer_norm/backward".
        shape, dtype: of x.
        num_groups: of GroupNorm, 0 elsewhere.
        layout: of GroupNorm, "nchw" or "nhwc".
        residual: whether the request has one.
        affine: whether the request has weight and bias.
        adaptive: whether the request has scale and shift for each sample; only GroupNorm.
        seed: of the values.
        weight_offset: 0 or 1, added to weight; not of GroupNorm.
        heads: whether each head of x [..., heads, cols] has weight and bias of its own; not of GroupNorm.
        residual_dtype: of the residual; None for x's.
        out_dtype: of y; None for x's.
        norms: number of norms of a chain, 0 elsewhere.
        parts: number of tensors, with the same parameters, into which x and tensors of its shape are split; 0: one.
    """

    operation: str
    shape: tuple[int, ...]
    dtype: DType
    activation: str = "none"
    residual: bool = False
    affine: bool = True
    num_groups: int = 0
    layout: str = "nchw"
    seed: int = 0
    adaptive: bool = False
    weight_offset: int = 0
    heads: bool = False
    residual_dtype: DType | None = None
    out_dtype: DType | None = None
    norms: int = 0
    parts: int = 0

    @property
    def op(self) -> str:
        """The operation without its direction."""
        return self.operation.removesuffix("/backward")

    @property
    def is_backward(self) -> bool:
        """Whether the operation computes gradients."""
        return self.operation.endswith("/backward")

    @property
    def channel_axis(self) -> int:
        """The axis of x whose size weight and bias have."""
        return 1 if self.op == "group_norm" and self.layout == "nchw" else -1

    def parameters(self) -> dict[str, str | int]:
        """The request's query, in the form that the client's methods take."""
        parameters: dict[str, str | int] = {} if self.norms else {"activation": self.activation}
        if self.weight_offset:
            parameters["weight_offset"] = self.weight_offset
        if self.out_dtype is not None:
            parameters["out_dtype"] = self.out_dtype.value
        if self.op == "group_norm":
            parameters |= {"num_groups": self.num_groups, "layout": self.layout}
        return parameters

    def tensors(self) -> dict[str, HostTensor]:
        """The request's tensors by name: new ones at each call, with the same values.

        Weight and bias follow from the seed and the size of the normalised axis alone, so that a server that holds
        them can be used with any number of rows.
        """
        numbers, parameters = np.random.default_rng(self.seed), np.random.default_rng([self.seed, 1])
        size = self.shape[-2:] if self.heads else (self.shape[self.channel_axis],)
        parameter_dtype = DType.FLOAT32 if self.seed % 2 else self.dtype
        offset, scale = numbers.uniform(-2, 2), numbers.uniform(0.5, 2)
        tensors = {"x": narrow(numbers.normal(offset, scale, self.shape), self.dtype)}
        if self.is_backward:
            tensors["dy"] = narrow(numbers.normal(0, 1, self.shape), self.dtype)
        if self.residual:
            tensors["residual"] = narrow(numbers.normal(0, 1, self.shape), self.residual_dtype or self.dtype)
        for norm in range(self.norms):
            tensors[f"weight.{norm}"] = narrow(parameters.normal(1, 0.3, size), parameter_dtype)
            tensors[f"bias.{norm}"] = narrow(parameters.normal(0, 0.3, size), parameter_dtype)
        if self.affine and not self.norms:
            tensors["weight"] = narrow(parameters.normal(1 - self.weight_offset, 0.3, size), parameter_dtype)
            if self.op != "rms_norm":
                tensors["bias"] = narrow(parameters.normal(0, 0.3, size), parameter_dtype)
        if self.adaptive:
            for name in ("scale", "shift"):
                tensors[name] = narrow(numbers.normal(0, 0.3, (self.shape[0], *size)), parameter_dtype)
        return tensors
