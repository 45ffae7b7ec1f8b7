"""Requests as tritonclient makes them, and what torch says that their answers should be."""

import contextlib
from collections.abc import Iterator

import httpx
import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import tritonclient.http as triton

from tests.integration.harness.wire import packed

NORM = torch.linspace(0.5, 1.5, 8), torch.linspace(-1, 1, 8)
"""Weight and bias of the registered layer."""

DATATYPES = {"FP32": np.dtype(np.float32), "FP16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
TOLERANCES = {"FP32": 2e-5, "FP16": 4e-3, "BF16": 3e-2}

#: By operation: x's shape, the channels, the parameters, and the operation in torch.
CASES = {
    "layer_norm": ((5, 7, 33), 33, {}, lambda h, w, b: F.layer_norm(h, (33,), w, b, 1e-5)),
    "rms_norm": ((5, 33), 33, {}, lambda h, w, b: F.rms_norm(h, (33,), w, 1e-6)),
    "group_norm": ((2, 6, 4, 5), 6, {"num_groups": 3}, lambda h, w, b: F.group_norm(h, 3, w, b, 1e-5)),
}


def random(*shape: int, datatype: str = "FP32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(DATATYPES[datatype])


def tensor(name: str, array: np.ndarray, *, binary: bool = True) -> triton.InferInput:
    """One input of a request."""
    made = triton.InferInput(name, list(array.shape), NAMES[array.dtype])
    return made.set_data_from_numpy(array, binary_data=binary)


def tensors(arrays: dict[str, np.ndarray], *, binary: bool = True) -> list[triton.InferInput]:
    return [tensor(name, array, binary=binary) for name, array in arrays.items()]


def parameters_of(op: str, channels: int, datatype: str = "FP32") -> dict[str, np.ndarray]:
    """A weight, and a bias where the operation takes one."""
    names = ("weight",) if op == "rms_norm" else ("weight", "bias")
    return {name: random(channels, datatype=datatype, seed=1 + len(name)) for name in names}


def expected(op: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What torch gives for these inputs in float64; with `dy` among them, the gradients."""
    wide = {name: torch.from_numpy(array.astype(np.float64)) for name, array in given.items()}
    leaves = {name: wide[name].requires_grad_() for name in ("x", "weight", "bias") if name in wide}
    *_, run = CASES[op]
    y = run(wide["x"], wide.get("weight"), wide.get("bias"))
    if "dy" not in given:
        return {"y": y.detach().numpy()}
    y.backward(wide["dy"])
    return {f"d{name}": leaf.grad.numpy() for name, leaf in leaves.items()}


def assert_close(result: triton.InferResult, wanted: dict[str, np.ndarray], datatype: str) -> None:
    """Each output is there, in this type, and right."""
    for name, array in wanted.items():
        got = result.as_numpy(name)
        assert got.dtype == DATATYPES[datatype], name
        scale = max(1.0, float(np.abs(array).max()))
        np.testing.assert_allclose(got.astype(np.float64), array, atol=TOLERANCES[datatype] * scale, rtol=0)


@contextlib.contextmanager
def register_norm(api: httpx.Client) -> Iterator[str]:
    """Register a LayerNorm of eight channels, eps 1e-3 and relu; yield its name, and remove it at the end."""
    weight, bias = NORM
    query = {"op": "layer_norm", "eps": "1e-3", "activation": "relu"}
    headers = {"content-type": "application/x-safetensors"}
    name = "blocks.0.norm"
    content = packed(weight=weight, bias=bias)
    assert api.put(f"/v1/layers/{name}", params=query, content=content, headers=headers).is_success
    yield name
    api.delete(f"/v1/layers/{name}")
