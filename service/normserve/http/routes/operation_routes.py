"""The header of a payload, and the prepared payload that follows from it."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from normserve.codec import npy, safetensors
from normserve.codec.media_types import NPY
from normserve.jobs.job import NormSpec
from normserve.jobs.memory_cost import MemoryCost
from normserve.memory.tensors import HostTensor
from normserve.requests.numbered_tensors import TensorSplit

_NPY_START = b"\x93NUMPY\x01\x00"
_NPY_LENGTH_END, _SAFETENSORS_LENGTH_END = 10, 8


class PayloadTensor(Protocol):
    """One tensor in the payload's header, with a validated byte range."""

    def view_tensor(self, body: memoryview) -> HostTensor:
        """Return the tensor as a view of the body."""


class ResponseFormat(NamedTuple):
    """The form of a response.

    Attributes:
        media_type: the media type of the response.
        tensor_split: how results are divided if x was sent as several tensors.
    """

    media_type: str
    tensor_split: TensorSplit | None


class PreparedPayload(NamedTuple):
    """The results of checking a request's head, its payload's header and length, and its layer."""

    tensors: Mapping[str, PayloadTensor]
    spec: NormSpec
    cost: MemoryCost
    response_format: ResponseFormat


def parse_payload(body: memoryview, body_format: str) -> Mapping[str, PayloadTensor]:
    """Parse the header of a body; return the tensors by name.

    Raises:
        MalformedPayloadError, TooLargeError: as the formats' readers do.
    """
    if body_format == NPY:
        return {"x": npy.read_entry(body)}
    return {entry.name: entry for entry in safetensors.read_entries(body)}


def get_payload_header(body: memoryview) -> bytes:
    """Return the bytes of a body before its tensors' data; empty if they are too many or need more parsing."""
    start = bytes(body[:_NPY_LENGTH_END])
    if start.startswith(_NPY_START):
        end = _NPY_LENGTH_END + int.from_bytes(start[_SAFETENSORS_LENGTH_END:], "little")
    else:
        end = _SAFETENSORS_LENGTH_END + int.from_bytes(start[:_SAFETENSORS_LENGTH_END], "little")
    longest = min(len(body), safetensors.REQUEST_LIMITS.max_header_bytes)
    return bytes(body[:end]) if end <= longest else b""
