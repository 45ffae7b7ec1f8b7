"""Senders of the corpus's calls, one for each way into the server."""

import hashlib
import json
import uuid
from collections.abc import Mapping
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec
import numpy as np
import torch
from normserve.codec import local_messages as frames
from torch import Tensor

from tests.corpus.calls import NormCall
from tests.integration.harness.device_wire import DeviceConnection
from tests.integration.harness.local_wire import LocalConnection
from tests.integration.harness.raw import Answer, Connection
from tests.integration.harness.wire import NPY, SAFETENSORS, from_npy, packed, unpacked

_DATATYPES = {
    torch.float32: "FP32",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.int32: "INT32",
    torch.float64: "FP64",
}
_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.float64: "float64",
}
_SHARED_BYTES = 4 * 2**20
_LONGEST_TEXT = 4000
TIMEOUT_S = 15.0
"""For a response: more than a slow machine takes, less than a deadline whose unit is wrong."""


Response = dict[str, Any]
"""Status, headers and body, as JSON has them."""


class Transport(Protocol):
    """A connection that has at most one call in progress.

    Attributes:
        request_count: requests that it has sent, those that prepare a call as well.
        request_names: names of the requests whose ids the server has chosen, by these ids.
    """

    request_count: int
    request_names: dict[str, str]

    def send(self, call: NormCall, request_id: str) -> None:
        """Send a call."""

    def receive(self) -> Response:
        """Receive its response."""

    def close(self) -> None:
        """End the connection, whatever is in progress."""


class HttpTransport:
    """`/v1` with safetensors, on one connection for as long as the server keeps it."""

    def __init__(self, address: Any) -> None:
        self._address = address
        self._connection: Connection | None = None
        self.request_count = 0
        self.request_names: dict[str, str] = {}

    def send(self, call: NormCall, request_id: str) -> None:
        query = f"?{urlencode(call.parameters)}" if call.parameters else ""
        path = f"/v1/{call.op}" + ("/backward" if call.direction == "backward" else "") + query
        # Safetensors takes no tensors that share memory.
        body = packed(**{name: tensor.clone() for name, tensor in call.tensors.items()})
        self.send_request(path, body, call.key, request_id, {"content-type": SAFETENSORS})

    def send_request(
        self,
        path: str,
        body: bytes,
        key: str | None,
        request_id: str,
        headers: dict[str, str],
        method: str = "POST",
    ) -> None:
        """Send one request."""
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"x-request-id: {request_id}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {len(body)}"] + ([f"authorization: Bearer {key}"] if key else [])
        self.request_names[request_id] = request_id
        self.send_bytes("\r\n".join([*lines, "", ""]).encode() + body)

    def send_bytes(self, content: bytes) -> None:
        """Send the bytes of one request."""
        if self._connection is None:
            self._connection = Connection(self._address, TIMEOUT_S)
        self.request_count += 1
        self._connection.sendall(content)

    def change_layer(self, change: str, weight: Tensor, key: str | None, request_id: str) -> Response:
        """Register, replace, read or remove the layer `a`, list all, or have the server describe itself."""
        method, path = {
            "register": ("PUT", "/v1/layers/a?op=rms_norm"),
            "replace": ("PUT", "/v1/layers/a?op=rms_norm&eps=0.1"),
            "read": ("GET", "/v1/layers/a"),
            "list": ("GET", "/v1/layers"),
            "describe": ("GET", "/v1/info"),
            "remove": ("DELETE", "/v1/layers/a"),
        }[change]
        body = packed(weight=weight) if method == "PUT" else b""
        self.send_request(path, body, key, request_id, {"content-type": SAFETENSORS}, method)
        return HttpTransport.receive(self)

    def receive(self, *, has_body: bool = True) -> Response:
        assert self._connection is not None
        if not has_body:
            return self._receive_header()
        answer = self._connection.answer()
        if answer.headers.get("connection") == "close":
            self._disconnect()
        return {"status": answer.status_code, "headers": answer.headers, "body": _described_body(answer)}

    def close(self) -> None:
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _receive_header(self) -> Response:
        assert self._connection is not None
        received = b""
        while b"\r\n\r\n" not in received:
            more = self._connection.recv(65536)
            assert more, f"the server closed after {received!r}"
            received += more
        answer = Answer(received)
        return {"status": answer.status_code, "headers": answer.headers, "body": None}


class OipTransport(HttpTransport):
    """`/v2` with binary tensors."""

    def send(self, call: NormCall, request_id: str) -> None:
        contents = {name: _bytes_of(tensor) for name, tensor in call.tensors.items()}
        inputs = [
            self.input_of(name, tensor, {"binary_data_size": len(contents[name])})
            for name, tensor in call.tensors.items()
        ]
        header = {
            "id": request_id,
            "inputs": inputs,
            "parameters": {"binary_data_output": True} | parse_parameters(call.parameters),
        }
        self.infer(call, header, b"".join(contents.values()), request_id)

    def infer(self, call: NormCall, header: dict[str, Any], tensors: bytes, request_id: str) -> None:
        """Send the JSON of a request and its tensors."""
        model = call.op + ("_backward" if call.direction == "backward" else "")
        text = json.dumps(header).encode()
        headers = {"inference-header-content-length": str(len(text)), "content-type": "application/octet-stream"}
        self.send_request(f"/v2/models/{model}/infer", text + tensors, call.key, request_id, headers)

    @staticmethod
    def input_of(name: str, tensor: Tensor, parameters: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": name,
            "shape": list(tensor.shape),
            "datatype": _DATATYPES[tensor.dtype],
            "parameters": parameters,
        }


class OipSharedMemoryTransport(OipTransport):
    """`/v2` with tensors in a region of shared memory, which is registered with each key that a call states."""

    def __init__(self, address: Any, prefix: str, number: int) -> None:
        """Args: number: of the connection; names of regions are the server's."""
        super().__init__(address)
        self._number = number
        self._memory = SharedMemory(f"{prefix}{uuid.uuid4().hex[:8]}", create=True, size=_SHARED_BYTES)
        self._regions: dict[str | None, str] = {}
        self._region = ""
        self._offsets: dict[str, int] = {}

    def send(self, call: NormCall, request_id: str) -> None:
        if call.key not in self._regions:
            self._register(call.key)
        self._region = self._regions[call.key]
        offset, inputs, outputs = 0, [], []
        for name, tensor in call.tensors.items():
            content = _bytes_of(tensor)
            self._memory.buf[offset : offset + len(content)] = content
            inputs.append(self.input_of(name, tensor, self._region_parameters(offset, len(content))))
            offset += _aligned(len(content))
        self._offsets = {}
        for name, shape in call.results.items():
            nbytes = 4 * torch.Size(shape).numel()
            self._offsets[name] = offset
            outputs.append({"name": name, "parameters": self._region_parameters(offset, nbytes)})
            offset += _aligned(nbytes)
        header = {"id": request_id, "inputs": inputs, "parameters": parse_parameters(call.parameters)}
        self.infer(call, header | ({"outputs": outputs} if outputs else {}), b"", request_id)

    def _register(self, key: str | None) -> None:
        """Register the region under a name of this key's; a key that may not do so is refused later, too."""
        self._offsets = {}
        name = self._regions[key] = f"region-{self._number}-{len(self._regions)}"
        body = json.dumps({"key": self._memory.name, "byte_size": _SHARED_BYTES}).encode()
        self.send_request(f"/v2/systemsharedmemory/region/{name}/register", body, key, "register", {})
        self.receive()

    def receive(self) -> Response:
        response = super().receive()
        for output in response["body"]["outputs"] if self._offsets and response["status"] == 200 else []:
            content = bytes(self._memory.buf[self._offsets[output["name"]] :])
            output |= _digest(_values(content, _dtype_named(output["datatype"]), output["shape"]))
        return response

    def _region_parameters(self, offset: int, nbytes: int) -> dict[str, Any]:
        return {
            "shared_memory_region": self._region,
            "shared_memory_byte_size": nbytes,
            "shared_memory_offset": offset,
        }

    def close(self) -> None:
        super().close()
        if self._memory.buf is not None:
            self._memory.close()
            self._memory.unlink()


class LocalTransport:
    """Shared memory of a client on the same host."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key: str | None = None
        self._wire: Any = None
        self._refusal: frames.LocalResponse | None = None
        self._segment = 0
        self._request_id = ""
        self.request_count = 0
        self.request_names: dict[str, str] = {}

    def send(self, call: NormCall, request_id: str) -> None:
        """Send a call; on a connection of its own for each key, which only the first message states."""
        if self._wire is not None and call.key != self._key:
            self.close()
        self._request_id = request_id
        if self._wire is None and not self._connect(call.key):
            return
        memory = self._memory()
        offset, tensors, results = 0, {}, {}
        for name, tensor in call.tensors.items():
            content = _bytes_of(tensor)
            memory[offset : offset + len(content)] = content
            tensors[name] = frames.TensorReference(self._segment, offset, _NAMES[tensor.dtype], tuple(tensor.shape))
            offset += _aligned(len(content))
        for name, shape in call.results.items():
            nbytes = 4 * torch.Size(shape).numel()
            results[name] = frames.SegmentRange(self._segment, offset, nbytes)
            offset += _aligned(nbytes)
        query = urlencode(call.parameters)
        self.request_count += 1
        self._wire.send(frames.ComputeMessage(call.op, tensors, results, call.direction, query), 1)

    def receive(self) -> Response:
        if self._refusal is not None:
            answer = self._refusal
            self.close()
        else:
            received = self._wire.receive()
            if received is None:
                return {"status": "closed", "headers": {}, "body": None}
            answer = received[1]
            self.request_names[answer.request_id] = self._request_id
        return self._response(answer)

    def change_layer(self, change: str, weight: Tensor, key: str | None, request_id: str) -> Response:
        """Register, replace, read or remove the layer `a`, list all, or have the server describe itself."""
        if self._wire is not None and key != self._key:
            self.close()
        self._request_id = request_id
        if self._wire is None and not self._connect(key):
            return self.receive()
        content = _bytes_of(weight)
        self._memory()[: len(content)] = content
        tensors = {"weight": frames.TensorReference(self._segment, 0, _NAMES[weight.dtype], tuple(weight.shape))}
        message: frames.Message = {
            "register": frames.PutLayerMessage("a", "op=rms_norm", tensors),
            "replace": frames.PutLayerMessage("a", "op=rms_norm&eps=0.1", tensors),
            "read": frames.GetLayerMessage("a"),
            "list": frames.ListLayersMessage(),
            "describe": frames.GetInfoMessage(),
            "remove": frames.DeleteLayerMessage("a"),
        }[change]
        return self._response(self._exchange(message, request_id))

    def cancel(self) -> None:
        """Withdraw the call in progress."""
        self._wire.send(frames.CancelRequestMessage(1))

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire = self._refusal = None

    def _connect(self, key: str | None) -> bool:
        """Connect with a key; whether the server takes it."""
        self._key = key
        self._wire = self._open()
        answer = self._exchange(frames.HelloMessage(frames.VERSION, key), "hello")
        if answer.status == 200:
            self.request_count += 1
            answer = self._request_segment()
            self.request_names[answer.request_id] = "grow"
        if answer.segment is None:
            self._refusal = answer
            return False
        self._segment = answer.segment
        return True

    def _exchange(self, message: Any, name: str) -> frames.LocalResponse:
        self.request_count += 1
        self._wire.send(message, 1)
        received = self._wire.receive()
        if received is None:
            raise ConnectionError("the server closed in place of an answer")
        # One that is refused with its connection has a number that is nobody's.
        answer: frames.LocalResponse = received[1]
        self.request_names[answer.request_id] = name
        return answer

    def _response(self, answer: frames.LocalResponse) -> Response:
        body = msgspec.to_builtins(answer)
        body["results"] = {name: self._described(each) for name, each in answer.results.items()}
        return {"status": answer.status, "headers": {}, "body": body}

    def _described(self, located: frames.TensorReference) -> Any:
        content = bytes(self._memory()[located.offset :])
        values = _values(content, getattr(torch, located.dtype), located.shape)
        return {"dtype": located.dtype, "shape": list(located.shape)} | _digest(values)

    def _open(self) -> Any:
        return LocalConnection(self._path, greet=False, timeout_s=TIMEOUT_S)

    def _request_segment(self) -> frames.LocalResponse:
        answer: frames.LocalResponse = self._wire.request_segment(_SHARED_BYTES)
        return answer

    def _memory(self) -> memoryview:
        return memoryview(self._wire.segments[self._segment])


class LocalDeviceTransport(LocalTransport):
    """Shared memory of a device, which is the host's."""

    def _open(self) -> Any:
        return DeviceConnection(self._path, greet=False)

    def _request_segment(self) -> frames.LocalResponse:
        answer: frames.LocalResponse = self._wire.request_device_segment(_SHARED_BYTES)
        return answer

    def _memory(self) -> memoryview:
        content: memoryview = self._wire.content(self._segment)
        return content


def _described_body(answer: Answer) -> Any:
    """Return what a body has: JSON as it is, tensors by a digest of their values, anything else as text."""
    kind = answer.headers.get("content-type", "")
    length = answer.headers.get("inference-header-content-length")
    if length is not None:
        return _binary_outputs(answer.content, int(length))
    if kind == NPY:
        values = from_npy(answer.content)
        return {"header": answer.content.partition(b"\n")[0].decode("latin-1")} | _digest(values.flatten().tolist())
    if len(answer.content) > _LONGEST_TEXT and kind != SAFETENSORS:
        return {"bytes": len(answer.content), "sha256": hashlib.sha256(answer.content).hexdigest()}
    if "json" in kind:
        return answer.json()
    if kind == SAFETENSORS:
        header_bytes = 8 + int.from_bytes(answer.content[:8], "little")
        tensors = {
            name: _digest(each.double().flatten().tolist())
            for name, each in sorted(unpacked(answer.content).items())
        }
        return {"header": answer.content[8:header_bytes].decode()} | tensors
    return answer.text


def _binary_outputs(content: bytes, length: int) -> Any:
    body, offset = json.loads(content[:length]), length
    for output in body["outputs"]:
        output |= _digest(_values(content[offset:], _dtype_named(output["datatype"]), output["shape"]))
        offset += output["parameters"]["binary_data_size"]
    assert offset == len(content)
    return body


def _dtype_named(datatype: str) -> torch.dtype:
    return next(dtype for dtype, name in _DATATYPES.items() if name == datatype)


def _digest(values: list[float]) -> dict[str, Any]:
    """Return the first and last values and the sum of all magnitudes: rounding alters it little, unlike a hash."""
    return {"first": values[:4], "last": values[-2:], "magnitude": float(sum(map(abs, values)))}


def parse_parameters(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return parameters as JSON has them: numbers and booleans where they are such."""
    return {name: _parsed(text) for name, text in parameters.items()}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _values(content: bytes, dtype: torch.dtype, shape: Any) -> list[float]:
    count = torch.Size(shape).numel()
    if not count:
        return []
    data = np.frombuffer(content, np.uint8, count * dtype.itemsize).copy()
    values: list[float] = torch.from_numpy(data).view(dtype).double().tolist()
    return values
