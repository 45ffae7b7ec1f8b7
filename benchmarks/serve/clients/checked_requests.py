"""Requests, and the check of their responses."""

import io
from collections.abc import Mapping

import numpy as np
import torch

from benchmarks.serve.clients.raw_client import RawConnection, WireResponse

COLS = 1024

# Responses up to this size are compared completely.
_WHOLE_BYTES, _WINDOW_BYTES = 4 * 2**20, 2**20

# For values up to about ten in float32; as in the tests of the CUDA backend.
_ATOL = 3e-5


def make_parameters(cols: int = COLS) -> dict[str, np.ndarray]:
    """The registered layer's weight and bias."""
    random_numbers = np.random.default_rng(0)
    return {name: random_numbers.standard_normal(cols, dtype=np.float32) for name in ("weight", "bias")}


def make_x(nbytes: int) -> np.ndarray:
    """float32 [rows, COLS] with `nbytes`."""
    return np.random.default_rng(0).standard_normal((nbytes // 4 // COLS, COLS), dtype=np.float32)


def encode_npy(x: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


def check_response(x: np.ndarray, parameters: Mapping[str, np.ndarray], answer: bytes) -> None:
    """Raises: AssertionError: the response is not LayerNorm of x, up to errors by another order of sums."""
    got = torch.from_numpy(np.load(io.BytesIO(answer)))
    torch.testing.assert_close(got, compute_expected(x, parameters).float(), rtol=1e-5, atol=_ATOL)


def compute_expected(x: np.ndarray, parameters: Mapping[str, np.ndarray]) -> torch.Tensor:
    """LayerNorm of x in float64."""
    weight, bias = (torch.from_numpy(parameters[name]).double() for name in ("weight", "bias"))
    return torch.nn.functional.layer_norm(torch.from_numpy(x).double(), weight.shape, weight, bias)


class CheckedRequest:
    """LayerNorm of float32 rows with the registered layer; its responses are compared, the first with torch's.

    A row's bits do not depend on the other rows of its batch, so all later responses must equal the first one.  Of
    long responses a window is compared, a different one each time, so that the client does not limit the rate.
    """

    def __init__(self, path: str, nbytes: int, parameters: Mapping[str, np.ndarray]) -> None:
        self._x = np.random.default_rng(nbytes).standard_normal((nbytes // 4 // COLS, COLS), dtype=np.float32)
        self._parameters = parameters
        self._right: bytes | None = None
        self._window = 0
        self.body = encode_npy(self._x)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-npy\r\n"
        self.head = f"{head}Content-Length: {len(self.body)}\r\n".encode()

    async def send(self, wire: RawConnection, *, waits_for_leave: bool = False) -> WireResponse:
        """Send it and check the response, if it is successful."""
        answered = await wire.exchange(self.head, self.body, waits_for_leave=waits_for_leave)
        if answered.status == 200:
            self.check_body(answered.body)
        return answered

    def check_body(self, answer: bytearray) -> None:
        """Raises: AssertionError: the response is wrong."""
        if self._right is None:
            self._right = bytes(answer)
            check_response(self._x, self._parameters, self._right)
        assert len(answer) == len(self._right), "an answer is of another length than the first one"
        start = self._window
        if len(answer) <= _WHOLE_BYTES:
            right = answer == self._right
        else:
            right = answer[start : start + _WINDOW_BYTES] == self._right[start : start + _WINDOW_BYTES]
            self._window = (start + _WINDOW_BYTES) % len(answer)
        assert right, "an answer differs from the first one to the same request"
