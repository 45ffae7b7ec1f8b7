"""The source of a tensor's bytes in an inference request: the JSON, the body, or a region of shared memory."""

from collections.abc import Mapping

from normserve.codec import json_tensors
from normserve.http.oip.asked import BinarySource, InputTensor, JsonSource
from normserve.memory.device_segments import DeviceMemoryView
from normserve.memory.device_tensors import DeviceTensor
from normserve.memory.tensors import HostTensor


def build_tensors(
    inputs: tuple[InputTensor, ...], body: memoryview, shared: Mapping[str, memoryview]
) -> Mapping[str, HostTensor]:
    """Build the tensors by name; binary ones are views of the body.

    Args: shared: the tensors in regions, by name: copies, or `DeviceMemoryView` of the regions themselves.

    Raises:
        NormserveError: a tensor is invalid.
    """
    return {each.name: _build_input_tensor(each, body, shared) for each in inputs}


def _build_input_tensor(each: InputTensor, body: memoryview, shared: Mapping[str, memoryview]) -> HostTensor:
    match each.source:
        case BinarySource(start):
            return HostTensor(each.dtype, each.shape, body[start : start + each.nbytes])
        case JsonSource(json):
            return json_tensors.decode(each.name, each.dtype, each.shape, json)
        case _:
            data = shared[each.name]
            kind = DeviceTensor if isinstance(data, DeviceMemoryView) else HostTensor
            return kind(each.dtype, each.shape, data)


def count_external_bytes(inputs: tuple[InputTensor, ...]) -> int:
    """Count the bytes of the tensors whose memory is not the body."""
    return sum([each.nbytes for each in inputs if type(each.source) is not BinarySource])
