"""The simplest server: LayerNorm behind FastAPI, without optimisations.

usage: python -m benchmarks.peers.fastapi_server PARAMETERS.npz cpu|cuda
Prints the port that it listens on.
"""

import io
import socket
import sys

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from torch.nn import functional


def make_app(weight: torch.Tensor, bias: torch.Tensor) -> FastAPI:
    """POST /layer_norm: npy in, npy out."""
    app = FastAPI()

    @app.post("/layer_norm")
    async def layer_norm(request: Request) -> Response:
        x = torch.from_numpy(np.load(io.BytesIO(await request.body()))).to(weight.device)
        with torch.inference_mode():
            y = functional.layer_norm(x, weight.shape, weight, bias)
        file = io.BytesIO()
        np.save(file, y.cpu().numpy())
        return Response(file.getvalue(), media_type="application/x-npy")

    return app


def main() -> None:
    parameters = np.load(sys.argv[1])
    torch.set_num_threads(1)
    app = make_app(*(torch.from_numpy(parameters[name]).to(sys.argv[2]) for name in ("weight", "bias")))
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(app, loop="uvloop", http="httptools", access_log=False, log_level="error")
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
