"""A request of the Open Inference Protocol, and its refusal."""

import json

import numpy as np

PATH = "/v2/models/layer_norm/infer"
X = np.linspace(-1, 1, 8, dtype=np.float32).tobytes()


def header(**said: object) -> dict[str, object]:
    x = {"name": "x", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}
    return {"inputs": [{**x, **said}]}


def body(said: object = None) -> tuple[bytes, int]:
    """A whole body, and the length of its JSON."""
    text = json.dumps(header() if said is None else said).encode()
    return text + X, len(text)


def assert_refused(response, *statuses: int) -> None:
    assert response.status_code in statuses, response.text
    assert response.json().keys() == {"error"}
