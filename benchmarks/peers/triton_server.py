"""LayerNorm behind NVIDIA Triton, by PyTriton; rows of different requests share a call.

usage: python -m benchmarks.peers.triton_server PARAMETERS.npz cpu|cuda PORT [GRPC_PORT]
"""

import socket
import sys

import numpy as np
import torch
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig
from torch.nn import functional

MODEL = "layer_norm"
_MAX_ROWS = 2**18
_WINDOW_US = 100


def main() -> None:
    parameters, device, port, *grpc_port = sys.argv[1:]
    torch.set_num_threads(1)
    arrays = np.load(parameters)
    weight, bias = (torch.from_numpy(arrays[name]).to(device) for name in ("weight", "bias"))

    @batch
    def layer_norm(x: np.ndarray) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            y = functional.layer_norm(torch.from_numpy(x).to(device), weight.shape, weight, bias)
        return {"y": y.cpu().numpy()}

    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=int(port),
        grpc_port=int(grpc_port[0]) if grpc_port else find_free_port(),
        metrics_port=find_free_port(),
        log_verbose=0,
    )
    # By default PyTriton requires a token to register regions of shared memory.
    unrestricted = TritonSecurityConfig(restricted_endpoints=[])
    with Triton(config=config, security_config=unrestricted) as triton:
        triton.bind(
            model_name=MODEL,
            infer_func=layer_norm,
            inputs=[Tensor(name="x", dtype=np.float32, shape=(len(weight),))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(len(weight),))],
            config=ModelConfig(
                max_batch_size=_MAX_ROWS, batcher=DynamicBatcher(max_queue_delay_microseconds=_WINDOW_US)
            ),
        )
        triton.serve()


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
