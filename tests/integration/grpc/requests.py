"""Requests as tritonclient makes them for gRPC."""

import numpy as np
import tritonclient.grpc as triton

from tests.integration.oip.models import NAMES


def make_input(name: str, array: np.ndarray) -> triton.InferInput:
    """One input of a request."""
    made = triton.InferInput(name, list(array.shape), NAMES[array.dtype])
    return made.set_data_from_numpy(array)


def make_inputs(arrays: dict[str, np.ndarray]) -> list[triton.InferInput]:
    return [make_input(name, array) for name, array in arrays.items()]
