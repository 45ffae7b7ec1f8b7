"""Writes what tests of `fusednorm.jax` compare with: results of `fusednorm.reference`, which needs torch.

Usage, in an environment with torch: python -m tests.jax.reference_values

`reference_cases.py` reads the file, `build/jax_reference_values.npz`, an archive of numpy arrays.  "calls" is JSON:
by each case's name, the function's name and its arguments that are not arrays.  The others are float64:
"CASE/inputs/ARGUMENT", "CASE/results/NAME", "CASE/cotangents/NAME" and "CASE/gradients/ARGUMENT".
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from fusednorm import reference
from torch import Tensor

from tests.jax.reference_cases import REFERENCE_VALUES

Shapes = dict[str, tuple[int, ...]]
Call = tuple[str, dict[str, Any], Shapes]
"""The function, its options, and the shapes of its arrays."""

_ACTIVATIONS = ("relu", "leaky_relu", "silu", "gelu", "gelu_tanh")
_BIG_SEED = (1 << 62) + 12345


def list_calls() -> Iterator[tuple[str, Call]]:
    """Yield the calls by their names."""
    yield from _list_row_calls()
    yield from _list_channel_calls()
    yield from _list_group_calls()


def _list_row_calls() -> Iterator[tuple[str, Call]]:
    rows = (6, 96)
    affine = {"weight": (96,), "bias": (96,)}
    yield "layer_norm", ("layer_norm", {}, {"x": rows, **affine})
    yield "layer_norm plain", ("layer_norm", {"eps": 1e-3}, {"x": rows})
    yield "layer_norm odd columns", ("layer_norm", {}, {"x": (2, 3, 37), "weight": (37,), "bias": (37,)})
    yield "layer_norm long rows", ("layer_norm", {}, {"x": (3, 5000), "weight": (5000,), "bias": (5000,)})
    yield "layer_norm heads", ("layer_norm", {}, {"x": (5, 4, 32), "weight": (4, 32), "bias": (4, 32)})
    for activation in _ACTIVATIONS:
        slope = {"negative_slope": 0.125} if activation == "leaky_relu" else {}
        options = {"activation": activation, **slope}
        yield f"layer_norm {activation}", ("layer_norm", options, {"x": rows, **affine})
    dropout = {"dropout": 0.3, "seed": 7, "activation": "silu"}
    yield "layer_norm dropout", ("layer_norm", dropout, {"x": (2, 3, 96), **affine})
    modulation = {"scale": (2, 96), "shift": (2, 96)}
    yield "layer_norm scale and shift", ("layer_norm", {}, {"x": (2, 5, 96), **affine, **modulation})
    one_between = {"scale": (2, 1, 96), "shift": (2, 1, 96)}
    yield "layer_norm scale alone", ("layer_norm", {"activation": "gelu"}, {"x": (2, 5, 96), "scale": (2, 96)})
    residual = {"x": (2, 5, 96), "residual": (2, 5, 96)}
    yield "add_layer_norm", ("add_layer_norm", {}, {**residual, **affine})
    everything = {**residual, **affine, **one_between, "gate": (2, 1, 96)}
    options = {"activation": "silu", "dropout": 0.25, "seed": _BIG_SEED, "weight_offset": 1.0}
    yield "add_layer_norm everything", ("add_layer_norm", options, everything)
    yield "rms_norm", ("rms_norm", {}, {"x": rows, "weight": (96,)})
    yield "rms_norm offset", ("rms_norm", {"weight_offset": 1.0, "eps": 1e-5}, {"x": rows, "weight": (96,)})
    yield "rms_norm heads", ("rms_norm", {"activation": "silu"}, {"x": (2, 3, 4, 32), "weight": (4, 32)})
    yield "rms_norm dropout", ("rms_norm", {"dropout": 0.5, "seed": 0}, {"x": rows, "weight": (96,)})
    yield "rms_norm scale and shift", ("rms_norm", {}, {"x": (2, 5, 96), "weight": (96,), **modulation})
    yield "add_rms_norm", ("add_rms_norm", {"weight_offset": 1.0}, {**residual, "weight": (96,)})
    gated = {**residual, "weight": (96,), "gate": (2, 96)}
    yield "add_rms_norm gate", ("add_rms_norm", {"activation": "gelu_tanh"}, gated)


def _list_channel_calls() -> Iterator[tuple[str, Call]]:
    images, layout = (2, 24, 5, 6), {"layout": "nchw"}
    affine = {"weight": (24,), "bias": (24,)}
    modulation = {"scale": (2, 24), "shift": (2, 24)}
    yield "layer_norm over channels", ("layer_norm", layout, {"x": images, **affine})
    dropout = {**layout, "dropout": 0.3, "seed": 11}
    yield "rms_norm over channels", ("rms_norm", dropout, {"x": images, "weight": (24,), **modulation})
    gated = {"x": images, "residual": images, **affine, **modulation, "gate": (2, 24)}
    yield "add_layer_norm over channels", ("add_layer_norm", {**layout, "activation": "silu"}, gated)


def _list_group_calls() -> Iterator[tuple[str, Call]]:
    affine = {"weight": (12,), "bias": (12,)}
    modulation = {"scale": (2, 12), "shift": (2, 12)}
    for layout, image, sequence in (
        ("nchw", (2, 12, 5, 7), (2, 12, 9)),
        ("nhwc", (2, 5, 7, 12), (2, 9, 12)),
    ):
        options = {"num_groups": 3, "layout": layout}
        yield f"group_norm {layout}", ("group_norm", options, {"x": image, **affine})
        yield f"group_norm {layout} plain", ("group_norm", {**options, "eps": 1e-3}, {"x": sequence})
        instances = {**options, "num_groups": 12, "activation": "leaky_relu"}
        yield f"group_norm {layout} instances", ("group_norm", instances, {"x": image, **affine})
        dropout = {**options, "activation": "silu", "dropout": 0.3, "seed": 7}
        yield f"group_norm {layout} dropout", ("group_norm", dropout, {"x": image, **affine, **modulation})
        residual = {"x": image, "residual": image, **affine}
        yield f"add_group_norm {layout}", ("add_group_norm", {**options, "activation": "gelu"}, residual)


def compute_case(function: str, options: dict[str, Any], shapes: Shapes) -> dict[str, dict[str, Tensor]]:
    """Draw a call's arrays, and compute its results and gradients in float64."""
    op = function.removeprefix("add_")
    inputs = {name: draw_exactly(shape) for name, shape in shapes.items()}
    inputs["x"] = round_exactly(2 * inputs["x"] + 1)
    names = ("y", "residual_out") if "residual" in inputs else ("y",)
    cotangents = {name: draw_exactly(shapes["x"]) for name in names}
    # For torch, channels-last is a memory format of [N, C, *spatial].
    options = dict(options)
    channels_last = op == "group_norm" and options.pop("layout") == "nhwc"

    def give(array: Tensor) -> Tensor:
        return array.movedim(-1, 1) if channels_last and array.shape == shapes["x"] else array

    def take(array: Tensor) -> Tensor:
        return array.movedim(1, -1) if channels_last and array.ndim > 2 else array

    arguments = {name: give(array) for name, array in inputs.items()} | options
    given = {name: give(array) for name, array in cotangents.items()}
    forward = getattr(reference, f"{op}_forward")(**arguments)
    dresidual_out = {"dresidual_out": given["residual_out"]} if "residual" in inputs else {}
    backward = getattr(reference, f"{op}_backward")(given["y"], **dresidual_out, **arguments)
    return {
        "inputs": inputs,
        "results": {name: take(getattr(forward, name)) for name in names},
        "cotangents": cotangents,
        "gradients": {name: take(getattr(backward, f"d{name}")) for name in inputs},
    }


def draw_exactly(shape: tuple[int, ...]) -> Tensor:
    """Draw normally distributed float64 numbers that are exact in all the types."""
    return round_exactly(torch.randn(shape, dtype=torch.float64))


def round_exactly(array: Tensor) -> Tensor:
    """Round to numbers that are exact in bfloat16 and float16."""
    return array.to(torch.bfloat16).to(torch.float16).to(torch.float64)


def main() -> None:
    torch.manual_seed(0)
    arrays, calls = {}, {}
    for name, (function, options, shapes) in list_calls():
        calls[name] = function, options
        for kind, values in compute_case(function, options, shapes).items():
            arrays |= {f"{name}/{kind}/{array}": value.numpy() for array, value in values.items()}
    REFERENCE_VALUES.parent.mkdir(exist_ok=True)
    np.savez_compressed(REFERENCE_VALUES, calls=np.array(json.dumps(calls)), **arrays)
    print(f"{len(calls)} cases in {REFERENCE_VALUES}")


if __name__ == "__main__":
    main()
