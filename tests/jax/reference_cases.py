"""Cases that tests of `fusednorm.jax` compare with, as `reference_values.py` has written them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

REFERENCE_VALUES = Path(__file__).parents[2] / "build" / "jax_reference_values.npz"


@dataclass(frozen=True)
class ReferenceCase:
    """A call of a function of `fusednorm.jax`, and what it and its derivative return in float64.

    Attributes:
        function: the function's name, such as "add_layer_norm".
        options: its arguments that are not arrays, by name.
        inputs: its arrays by the names of arguments: x and those of residual, weight, bias, scale, shift and gate
            that the call has.
        results: "y", and "residual_out" if there is a residual.
        cotangents: of the results, by their names.
        gradients: of the inputs, by their names.

    All arrays are float64.  Inputs and cotangents are exact in float32, bfloat16 and float16.
    """

    function: str
    options: dict[str, Any]
    inputs: dict[str, np.ndarray]
    results: dict[str, np.ndarray]
    cotangents: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


def load_reference_cases() -> dict[str, ReferenceCase]:
    """Read the cases by their names."""
    if not REFERENCE_VALUES.exists():
        raise FileNotFoundError(f"no {REFERENCE_VALUES}: python -m tests.jax.reference_values writes it with torch")
    with np.load(REFERENCE_VALUES) as file:
        arrays: dict[str, dict[str, dict[str, np.ndarray]]] = {}
        for key in file.files:
            if key != "calls":
                name, kind, array = key.split("/")
                arrays.setdefault(name, {}).setdefault(kind, {})[array] = file[key]
        calls = json.loads(str(file["calls"]))
    return {name: ReferenceCase(function, options, **arrays[name]) for name, (function, options) in calls.items()}
