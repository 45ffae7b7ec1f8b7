"""tritonclient with tensors in system shared memory; x is already there, as in load generators."""

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import shared_memory

PREFIX = f"normserve-bench-{os.getpid()}-"
"""Prefix of the names that a server must allow to register."""


class SharedMemoryCall:
    """Calls of one model whose x and y are in two regions."""

    def __init__(
        self, protocol: ModuleType, client: Any, server: str, model: str, x: np.ndarray, target: object
    ) -> None:
        """Args: protocol: `tritonclient.http` or `tritonclient.grpc`, of which the client is."""
        self._client, self._model, self._x, self._target = client, model, x, target
        self._source = protocol.InferInput("x", list(x.shape), "FP32")
        self._source.set_shared_memory(f"{server}-x", x.nbytes)
        self._wanted = protocol.InferRequestedOutput("y")
        self._wanted.set_shared_memory(f"{server}-y", x.nbytes)

    def __call__(self) -> np.ndarray:
        """Infer, and return a view of y."""
        self._client.infer(self._model, [self._source], outputs=[self._wanted])
        y: np.ndarray = shared_memory.get_contents_as_numpy(self._target, self._x.dtype, self._x.shape)
        return y

    def make_body(self) -> bytes:
        """The body that such a call sends over HTTP."""
        body, _ = triton.InferenceServerClient.generate_request_body([self._source], outputs=[self._wanted])
        return bytes(body)


@contextlib.contextmanager
def register_regions(
    protocol: ModuleType, client: Any, server: str, model: str, x: np.ndarray
) -> Iterator[SharedMemoryCall]:
    """Regions registered with a server while the context lasts; each server and protocol has its own.

    Args:
        protocol: `tritonclient.http` or `tritonclient.grpc`, of which the client is.
        server: a name of its own.
    """
    with contextlib.ExitStack() as stack:
        handles = []
        for name in ("x", "y"):
            region = f"{server}-{name}"
            key = PREFIX + region
            handle = shared_memory.create_shared_memory_region(region, key, x.nbytes, create_only=True)
            stack.callback(shared_memory.destroy_shared_memory_region, handle)
            client.register_system_shared_memory(region, key, x.nbytes)
            stack.callback(client.unregister_system_shared_memory, region)
            handles.append(handle)
        shared_memory.set_shared_memory_region(handles[0], [x])
        yield SharedMemoryCall(protocol, client, server, model, x, handles[1])
