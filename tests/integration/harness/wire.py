"""Payloads as the usual libraries write and read them."""

import io

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

SAFETENSORS = "application/x-safetensors"
NPY = "application/x-npy"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def packed(**tensors: Tensor | None) -> bytes:
    """Safetensors of what is not None."""
    return safetensors.torch.save({name: t.contiguous() for name, t in tensors.items() if t is not None})


def unpacked(content: bytes) -> dict[str, Tensor]:
    return safetensors.torch.load(content)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def from_npy(content: bytes) -> np.ndarray:
    return np.load(io.BytesIO(content), allow_pickle=False)


def assert_problem(response, status: int, code: str | None = None) -> None:
    """The response is a problem document that agrees with itself."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    # Nobody knows yet whether it is for a client of `/v2`, which looks for an error.
    more = {"error"} if code == "too_many_connections" else set()
    assert problem.keys() == {"type", "title", "status", "detail", "code", "request_id", *more}
    assert problem["status"] == status
    assert problem["request_id"] == response.headers["x-request-id"]
    assert problem["code"] == response.headers["x-error-code"]
    if code is not None:
        assert problem["code"] == code, problem


def assert_alive(api) -> None:
    """A plain request succeeds, and right."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    response = api.post("/v1/layer_norm", content=npy(x), headers={"content-type": NPY})
    assert response.status_code == 200, response.text
    expected = torch.nn.functional.layer_norm(torch.from_numpy(x), (4,))
    torch.testing.assert_close(torch.from_numpy(from_npy(response.content)), expected)


#: A small tensor that anybody may send.
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)


def post(api, path="/v1/layer_norm", content=None, params=None, **headers):
    """One POST of a small npy, or of `content`; headers by name with underscores."""
    sent = {"content-type": NPY} | {name.replace("_", "-"): value for name, value in headers.items()}
    return api.post(path, content=npy(X) if content is None else content, params=params, headers=sent)
