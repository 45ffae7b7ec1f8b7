"""Torch's tensors as regions of CUDA shared memory, and requests about them."""

import base64
from dataclasses import dataclass

import httpx
import torch
from normserve.memory.device_segments import ShareableDevice

from tests.service.memory.allocations import allocation_of

DATATYPES = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Region:
    """A whole allocation of torch's, registered under a name.

    Attributes:
        address: of its first byte.
        nbytes: that the driver says it has.
    """

    name: str
    address: int
    nbytes: int
    handle: bytes

    def of(self, tensor: torch.Tensor) -> dict[str, object]:
        """The parameters of a tensor that lies in it."""
        return {
            "shared_memory_region": self.name,
            "shared_memory_offset": tensor.data_ptr() - self.address,
            "shared_memory_byte_size": tensor.nbytes,
        }


def register(http: httpx.Client, name: str, handle: bytes, nbytes: int) -> httpx.Response:
    raw = {"b64": base64.b64encode(handle).decode()}
    said = {"raw_handle": raw, "device_id": 0, "byte_size": nbytes}
    return http.post(f"/v2/cudasharedmemory/region/{name}/register", json=said)


def registered(http: httpx.Client, name: str, tensor: torch.Tensor) -> Region:
    """The allocation that a tensor lies in, registered."""
    found = allocation_of(ShareableDevice(torch.cuda.current_device()), tensor.data_ptr())
    response = register(http, name, found.handle, found.nbytes)
    assert response.status_code == 200, response.text
    return Region(name, found.address, found.nbytes, found.handle)


def infer(
    http: httpx.Client,
    model: str,
    region: Region,
    inputs: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
    **parameters: object,
) -> httpx.Response:
    """A request whose tensors all lie in one region; what the client has begun on its own stream is over before."""
    torch.cuda.synchronize()
    given = [
        {
            "name": name,
            "datatype": DATATYPES[tensor.dtype],
            "shape": [*tensor.shape],
            "parameters": region.of(tensor),
        }
        for name, tensor in inputs.items()
    ]
    wanted = [{"name": name, "parameters": region.of(tensor)} for name, tensor in outputs.items()]
    said = {"inputs": given, "outputs": wanted, "parameters": parameters}
    return http.post(f"/v2/models/{model}/infer", json=said)
