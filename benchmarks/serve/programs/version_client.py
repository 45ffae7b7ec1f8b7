"""The client of one version in `benchmarks.serve.version_pairs`.

usage: python version_client.py URLS COLS

URLS is JSON: the servers' addresses by name.  Each line of JSON on standard input asks for a turn by `case`,
`bytes`, `device` and `seconds`; the response is the number of calls, their median seconds and the process's CPU
seconds.  It imports only what every version has, and is started with a version's sources in PYTHONPATH.
"""

import json
import socket
import struct
import sys
import time
from collections.abc import Callable
from statistics import median

import fusednorm
import numpy as np
import torch
from normserve.client import Client
from normserve.client.torch import LayerNorm

Call = Callable[[], object]
_STEP_SHAPE = 16, 4096


class RequestRepeater:
    """Sends the same HTTP request again and again, and receives the responses whole."""

    def __init__(self, url: str, path: str, headers: str, body: bytes) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self._received = bytearray(len(body) + 2**16)

    def __call__(self) -> None:
        self._socket.sendall(self._request)
        view, size, whole = memoryview(self._received), 0, 0
        while not whole or size < whole:
            size += self._socket.recv_into(view[size:])
            end = 0 if whole else self._received.find(b"\r\n\r\n", 0, min(size, 2**16))
            if end > 0:
                head = bytes(self._received[:end]).lower()
                assert head.startswith(b"http/1.1 200 "), head
                whole = end + 4 + int(head.split(b"content-length: ")[1].split(b"\r\n")[0])


def make_infer_body(x: np.ndarray) -> tuple[str, bytes]:
    """The headers and body of a /v2 request with binary tensors."""
    tensor = {
        "name": "x",
        "shape": x.shape,
        "datatype": "FP32",
        "parameters": {"binary_data_size": x.nbytes},
    }
    document = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = "Content-Type: application/octet-stream\r\n"
    return headers + f"Inference-Header-Content-Length: {len(document)}\r\n", document + x.tobytes()


def make_npy_body(x: np.ndarray) -> tuple[str, bytes]:
    """The headers and body of a request in npy format."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {x.shape}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + x.tobytes()
    return "Content-Type: application/x-npy\r\n", data


def make_call(case: str, urls: dict[str, str], nbytes: int, cols: int, device: str | None) -> Call:
    """The function that makes one call of `case`."""
    shape = nbytes // 4 // cols, cols
    x = np.random.default_rng(nbytes).standard_normal(shape, dtype=np.float32)
    match case.split(", ")[0]:
        case "raw http":
            return RequestRepeater(urls["http"], "/v1/layer_norm", *make_npy_body(x))
        case "raw front ends":
            return RequestRepeater(urls["frontends"], "/v1/layer_norm", *make_npy_body(x))
        case "raw v2":
            return RequestRepeater(urls["http"], "/v2/models/layer_norm/infer", *make_infer_body(x))
        case "http":
            client = Client(urls["http"])
            return lambda: client.layer_norm(x).y
        case "unix" | "unix host" as name:
            client = Client(urls["unix"])
            where = device if name == "unix" else None
            shared = client.empty(shape, torch.float32, device=where).normal_()
            return lambda: client.layer_norm(shared).y
        case "unix step":
            return make_step(Client(urls["unix"]), device)
        case "library":
            tensor = torch.from_numpy(x).to(device or "cpu")
            weight = torch.ones(cols, device=tensor.device)
            return lambda: fusednorm.layer_norm(tensor, weight, weight)
    raise ValueError(f"no case is called {case}")


def make_step(client: Client, device: str | None) -> Call:
    """Forward and backward of a module whose parameters are in shared memory, too."""
    rows, cols = _STEP_SHAPE
    module = LayerNorm(cols, client=client, device=device, dtype=torch.bfloat16)
    for parameter in module.parameters():
        shared = client.empty(parameter.shape, torch.bfloat16, device=device)
        parameter.data = shared.copy_(parameter.data)
    x, dy = (client.empty((rows, cols), torch.bfloat16, device=device).normal_() for _ in range(2))
    inputs = [x.requires_grad_(), *module.parameters()]
    return lambda: torch.autograd.grad(module(x), inputs, dy)


def run_turn(call: Call, seconds: float) -> dict[str, float]:
    """Make calls for so many seconds."""
    times: list[float] = []
    cpu = time.process_time()
    began = ended = time.perf_counter()
    while len(times) < 3 or ended - began < seconds:
        begun = time.perf_counter()
        call()
        ended = time.perf_counter()
        times.append(ended - begun)
    return {"calls": len(times), "median_s": median(times), "cpu_s": time.process_time() - cpu}


def main() -> None:
    urls, cols = json.loads(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    calls: dict[str, Call] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked["case"]
        if name not in calls:
            calls[name] = make_call(name, urls, asked["bytes"], cols, asked["device"])
        print(json.dumps(run_turn(calls[name], asked["seconds"])), flush=True)


if __name__ == "__main__":
    main()
