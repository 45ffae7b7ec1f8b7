"""Calls of the service that every transport can carry: operations that succeed, and refusals.

A call does not depend on the transport that sends it (`tests.corpus.transports`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormCall:
    """One operation.

    Attributes:
        name: unique in the corpus.
        op: the operation's name in the API.
        tensors: by their names in the API.
        results: names of the results, and their shapes, which memory is shared for.
        direction: "forward" or "backward".
        parameters: as HTTP's query has them.
        key: the API key that the caller states.
    """

    name: str
    op: str
    tensors: Mapping[str, Tensor]
    results: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    direction: str = "forward"
    parameters: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None


def ramp(*shape: int, dtype: torch.dtype = torch.float32, first: float = -1.0, last: float = 2.0) -> Tensor:
    """Return a tensor whose elements all differ."""
    return (
        torch.linspace(first, last, torch.Size(shape).numel(), dtype=torch.float64).sin().reshape(shape).to(dtype)
    )


X = ramp(3, 8)
WEIGHT, BIAS = ramp(8, first=0.5, last=1.5), ramp(8, last=0.5)
IMAGES = ramp(2, 4, 3, 3)
ROWS = (3,)
PLAIN = NormCall("plain", "layer_norm", {"x": X}, {"y": (3, 8)})
SIZE = (64, 1024)
LONG = NormCall("long", "layer_norm", {"x": ramp(*SIZE, last=90.0)}, {"y": SIZE})
"""More than a front end sends along with a header."""


def successes() -> Iterator[NormCall]:
    """Yield calls that every transport computes."""
    affine = {"x": X, "weight": WEIGHT, "bias": BIAS}
    y = {"y": (3, 8)}
    yield PLAIN
    yield NormCall("affine", "layer_norm", affine, y, parameters={"eps": "0.001", "activation": "silu"})
    statistics = {"mean": ROWS, "rstd": ROWS}
    yield NormCall("statistics", "layer_norm", affine, y | statistics, parameters={"stats": "true"})
    sums = {"residual": ramp(3, 8, first=1.0)}
    yield NormCall("residual", "layer_norm", affine | sums, y | {"residual_out": (3, 8)})
    yield NormCall("dropout", "layer_norm", affine, y, parameters={"dropout": "0.5", "seed": "7"})
    yield NormCall("half", "layer_norm", {"x": X.half()}, y, parameters={"out_dtype": "float32"})
    yield NormCall("brain float", "rms_norm", {"x": X.bfloat16(), "weight": WEIGHT}, y)
    yield NormCall("wide", "rms_norm", {"x": ramp(2, 300)}, {"y": (2, 300)})
    groups = {"num_groups": "2"}
    yield NormCall("groups", "group_norm", {"x": IMAGES}, {"y": (2, 4, 3, 3)}, parameters=groups)
    last = groups | {"layout": "nhwc", "activation": "relu"}
    yield NormCall("channels last", "group_norm", {"x": ramp(2, 3, 3, 4)}, {"y": (2, 3, 3, 4)}, parameters=last)
    gradients = {"dx": (3, 8), "dweight": (8,), "dbias": (8,)}
    dy = {"dy": ramp(3, 8, first=0.0)}
    yield NormCall("gradient", "layer_norm", affine | dy, gradients, "backward")
    yield NormCall("gradient of x", "rms_norm", {"x": X} | dy, {"dx": (3, 8)}, "backward")
    given = {"mean": X.mean(1), "rstd": (X.var(1, correction=0) + 1e-5).rsqrt()}
    yield NormCall("gradient of known statistics", "layer_norm", affine | dy | given, gradients, "backward")
    of_groups = {"x": IMAGES, "dy": ramp(2, 4, 3, 3, first=0.0), "weight": WEIGHT[:4]}
    yield NormCall(
        "gradient of groups", "group_norm", of_groups, {"dx": (2, 4, 3, 3), "dweight": (4,)}, "backward", groups
    )
    tokens = {"x": ramp(2, 3, 8), "scale": ramp(2, 8, last=0.5).half(), "shift": ramp(2, 1, 8, first=0.0)}
    yield NormCall("adaptive", "layer_norm", tokens | {"bias": BIAS}, {"y": (2, 3, 8)}, parameters={"eps": "0.001"})
    of_tokens = {"dx": (2, 3, 8), "dscale": (2, 8), "dshift": (2, 1, 8)}
    yield NormCall("gradient of adaptive", "rms_norm", tokens | {"dy": ramp(2, 3, 8)}, of_tokens, "backward")
    gated = {"x": ramp(2, 3, 8), "gate": ramp(2, 8, first=0.5), "residual": ramp(2, 3, 8, last=1.0)}
    yield NormCall("gate", "rms_norm", gated, {"y": (2, 3, 8), "residual_out": (2, 3, 8)})
    of_gate = {"dx": (2, 3, 8), "dresidual": (2, 3, 8), "dgate": (2, 8)}
    yield NormCall("gradient of a gate", "layer_norm", gated | {"dy": ramp(2, 3, 8)}, of_gate, "backward")
    over_channels = {"x": IMAGES, "weight": WEIGHT[:4], "scale": ramp(2, 4, last=0.5).half()}
    images, first = {"y": (2, 4, 3, 3)}, {"layout": "nchw"}
    positions = {"mean": (2, 3, 3), "rstd": (2, 3, 3)}
    yield NormCall(
        "channels first", "layer_norm", over_channels, images | positions, parameters=first | {"stats": "true"}
    )
    of_channels = {"dx": (2, 4, 3, 3), "dweight": (4,), "dscale": (2, 4)}
    gradient = over_channels | {"dy": ramp(2, 4, 3, 3, first=0.0)}
    yield NormCall("gradient of channels first", "rms_norm", gradient, of_channels, "backward", first)
    several = {"x.0": X, "x.1": ramp(2, 8), "weight": WEIGHT}
    yield NormCall("several", "layer_norm", several, {"y.0": (3, 8), "y.1": (2, 8)})
    chain = {"x": X, "weight.0": WEIGHT, "bias.0": BIAS, "weight.1": WEIGHT.flip(0)}
    yield NormCall("chain", "layer_norm_chain", chain, y)
    yield NormCall("no rows", "layer_norm", {"x": X[:0]}, {"y": (0, 8)})
    yield LONG


def refusals() -> Iterator[NormCall]:
    """Yield calls that every transport refuses for what they state."""
    plain = PLAIN
    for name, parameters in {
        "unknown parameter": {"epsilon": "1"},
        "eps of zero": {"eps": "0"},
        "eps that is no number": {"eps": "small"},
        "unknown activation": {"activation": "mish"},
        "dropout without a seed": {"dropout": "0.5"},
        "parameter of another operation": {"num_groups": "2"},
        "unknown layer": {"layer": "absent"},
        "deadline that is no number": {"timeout_ms": "soon"},
    }.items():
        yield replace(plain, name=name, parameters=parameters)
    yield replace(plain, name="weight of another length", tensors={"x": X, "weight": WEIGHT[:5]})
    images = {"x": IMAGES, "weight": ramp(3)}
    yield replace(plain, name="weight of the last axis", tensors=images, parameters={"layout": "nchw"})
    yield replace(plain, name="residual of another shape", tensors={"x": X, "residual": X[:2]})
    yield replace(plain, name="scale of other samples", tensors={"x": ramp(2, 3, 8), "scale": ramp(3, 8)})
    yield replace(plain, name="gate without a residual", tensors={"x": X, "gate": X})
    yield replace(plain, name="unexpected tensor", tensors={"x": X, "gamma": WEIGHT})
    yield replace(plain, name="no x", tensors={"weight": WEIGHT})
    yield replace(plain, name="no dy", direction="backward")
    yield replace(plain, name="integers", tensors={"x": torch.arange(8).reshape(2, 4).to(torch.int32)})
    yield replace(plain, name="double", tensors={"x": X.double()})
    yield replace(plain, name="empty rows", tensors={"x": X[:, :0]})
    yield replace(
        plain,
        name="groups that do not divide",
        op="group_norm",
        tensors={"x": IMAGES},
        results={"y": (2, 4, 3, 3)},
        parameters={"num_groups": "3"},
    )
    yield replace(plain, name="too large", tensors={"x": ramp(300, 1000)})
    yield replace(LONG, name="long of another length", tensors={**LONG.tensors, "weight": WEIGHT})
    yield replace(LONG, name="long with an unknown parameter", parameters={"epsilon": "1"})
    # Its body is admitted, and refused with its results.
    sums = {**LONG.tensors, "residual": LONG.tensors["x"].flip(0)}
    yield replace(LONG, name="more memory than there is", tensors=sums, results={"y": SIZE, "residual_out": SIZE})
