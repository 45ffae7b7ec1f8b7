"""LayerNorm behind LitServe, with its own worker process and its faster queue.

usage: python -m benchmarks.peers.litserve_server PARAMETERS.npz cpu|cuda PORT
"""

import io
import sys
from typing import Annotated

import litserve
import numpy as np
import torch
from fastapi import Body, Response
from pydantic import AfterValidator
from torch.nn import functional

NPY = "application/x-npy"
# Above any body of the benchmark; the server refuses larger ones.
_MAX_BODY_BYTES = 2**30


class ShortReprBytes(bytes):
    """A body with a short text: LitServe formats every request for a debug message, bytes in full."""

    def __repr__(self) -> str:
        return f"{len(self)} bytes"

    __str__ = __repr__


class LayerNormApi(litserve.LitAPI):
    """POST /predict: npy in, npy out."""

    def __init__(self, parameters: str) -> None:
        super().__init__()
        self._parameters = parameters

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        arrays = np.load(self._parameters)
        self._weight, self._bias = (torch.from_numpy(arrays[name]).to(device) for name in ("weight", "bias"))

    def decode_request(
        self, request: Annotated[bytes, Body(media_type=NPY), AfterValidator(ShortReprBytes)]
    ) -> torch.Tensor:
        return torch.from_numpy(np.load(io.BytesIO(request))).to(self._weight.device)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return functional.layer_norm(x, self._weight.shape, self._weight, self._bias)

    def encode_response(self, output: torch.Tensor) -> Response:
        file = io.BytesIO()
        np.save(file, output.cpu().numpy())
        return Response(file.getvalue(), media_type=NPY)


def main() -> None:
    parameters, device, port = sys.argv[1:]
    server = litserve.LitServer(
        LayerNormApi(parameters), accelerator=device, fast_queue=True, max_payload_size=_MAX_BODY_BYTES
    )
    server.run(host="127.0.0.1", port=int(port), generate_client_file=False, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
