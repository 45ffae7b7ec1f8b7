"""A mix of good and bad requests over both transports, and what the answers said."""

import re
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import torch

from tests.integration.harness.wire import NPY, SAFETENSORS, npy, packed

ROWS = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0))
IMAGES = ROWS.view(2, 16, 64, 64)
GOOD = [
    ("/v1/layer_norm", {}, NPY, npy(ROWS.numpy())),
    ("/v1/rms_norm", {}, NPY, npy(ROWS.numpy().astype(np.float16))),
    ("/v1/group_norm", {"num_groups": "8"}, SAFETENSORS, packed(x=IMAGES)),
    ("/v1/layer_norm/backward", {}, SAFETENSORS, packed(x=ROWS.bfloat16(), dy=ROWS.flip(0).bfloat16())),
    ("/v1/rms_norm/backward", {}, SAFETENSORS, packed(x=ROWS, dy=ROWS.flip(0), weight=ROWS[0].clone())),
    ("/v1/group_norm/backward", {"num_groups": "8"}, SAFETENSORS, packed(x=IMAGES, dy=IMAGES.flip(0))),
]
BAD = [
    ("/v1/layer_norm", {"eps": "0"}, NPY, GOOD[0][3]),
    ("/v1/rms_norm", {}, NPY, b"garbage"),
    ("/v1/group_norm", {}, NPY, GOOD[0][3]),
    ("/v1/layer_norm", {"timeout_ms": "0.000001"}, NPY, GOOD[0][3]),
    ("/v1/layer_norm", {}, "application/zip", GOOD[0][3]),
]


@dataclass
class Tally:
    """What was sent, and what the answers' headers said of kernels.

    Attributes:
        codes: requests by operation and status.
        kernels: bytes and seconds by operation and pass.
    """

    codes: Counter[tuple[str, str]] = field(default_factory=Counter)
    kernels: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, path: str, answer: httpx.Response) -> None:
        op, _, backward = path.removeprefix("/v1/").partition("/")
        with self._lock:
            self.codes[op, str(answer.status_code)] += 1
            if answer.status_code == 200:
                seconds = float(re.search(r"kernel;dur=([0-9.]+)", answer.headers["server-timing"])[1]) / 1000
                # Of a launch that several share each tells the whole: they tell it together.
                share = int(answer.headers["x-batch-size"])
                self.kernels[op, backward or "forward", "bytes"] += int(answer.headers["x-kernel-bytes"])
                self.kernels[op, backward or "forward", "seconds"] += seconds / share


def drive(url: str, uds: Path | None, seconds: float) -> Tally:
    """Send all of it once, and again for a time, on two connections of each transport."""
    tally = Tally()

    def one(number: int) -> None:
        wire = httpx.HTTPTransport(uds=str(uds), verify=False) if uds is not None and number % 2 else None
        end = time.monotonic() + seconds
        with httpx.Client(base_url=url, transport=wire, verify=False, timeout=60) as api:
            while True:
                for path, params, media_type, body in GOOD * 3 + BAD:
                    answer = api.post(path, params=params, content=body, headers={"content-type": media_type})
                    tally.add(path, answer)
                if time.monotonic() >= end:
                    return

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one, range(4)))
    return tally


def leave(address: tuple[str, int], tally: Tally) -> None:
    """Announce a body, send half of it and go."""
    with socket.create_connection(address) as connection:
        head = b"POST /v1/layer_norm HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4096\r\n\r\n"
        connection.sendall(head + bytes(2048))
    tally.codes["layer_norm", "499"] += 1
