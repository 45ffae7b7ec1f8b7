"""Where the bytes of an inference request's tensors come from: the JSON, the body, or a region of shared memory."""

from collections.abc import Mapping

from normserve.codec import json_tensors
from normserve.errors import MalformedPayloadError
from normserve.http.oip.asked import Binary, Data, Input, Output
from normserve.memory.host_tensors import HostTensor

_NO_REGIONS = "names a shared memory region, and this server shares no memory by names"


def tensors_of(inputs: tuple[Input, ...], body: memoryview) -> Mapping[str, HostTensor]:
    """The tensors by name; binary ones are views of the body.

    Raises:
        NormserveError: by what is wrong with one.
    """
    return {each.name: _tensor(each, body) for each in inputs}


def _tensor(each: Input, body: memoryview) -> HostTensor:
    match each.source:
        case Binary(start):
            return HostTensor(each.dtype, each.shape, body[start : start + each.nbytes])
        case Data(json):
            return json_tensors.decode(each.name, each.dtype, each.shape, json)
        case _:
            raise MalformedPayloadError(f"{each.name[:64]!r} {_NO_REGIONS}")


def brought_bytes(inputs: tuple[Input, ...]) -> int:
    """Bytes of the tensors that lie in other memory than the body."""
    return sum([each.nbytes for each in inputs if type(each.source) is not Binary])


def require_no_regions(outputs: tuple[Output, ...]) -> None:
    """Raises: MalformedPayloadError: an output is wanted where nothing can be written."""
    for each in outputs:
        if each.region is not None:
            raise MalformedPayloadError(f"{each.name!r} {_NO_REGIONS}")
