"""normserve's own API: all tensors of a request, and of a response, in one safetensors body."""

from collections.abc import Callable, Mapping
from itertools import pairwise

from normserve.client import BackwardResult, ForwardResult, HostTensor
from normserve.client.calls import operations
from normserve.client.calls.api_call import ApiCall
from normserve.client.responses.api_response import ApiResponse
from normserve.codec.api_names import PARAMETER_GRADIENTS, PARAMETERS
from normserve.codec.media_types import SAFETENSORS

from normload.adapters import AdapterRequest
from normload.load.request_cases import RequestCase

_Result = ForwardResult[HostTensor] | BackwardResult[HostTensor]

# Parameters, also of chains, and their gradients.
_OF_ALL = (*PARAMETERS, *PARAMETER_GRADIENTS)


class NativeAdapter:
    """normserve's own protocol; requests and responses have the same bytes as those of `normserve.client`."""

    def find_unsupported_reason(self, case: RequestCase) -> str | None:
        """Return None: every case is supported."""
        return None

    def make_request(self, case: RequestCase, tensors: Mapping[str, HostTensor]) -> AdapterRequest:
        """Make the HTTP request that `normserve.client` would send for the case.

        If `case.parts` is set, x and the other tensors of its rows are sent as that many separate
        tensors.
        """
        call = self.make_call(case, split_tensors(case, tensors) if case.parts else tensors)
        return AdapterRequest(
            call.method, call.target, call.encode_body() or (), call.max_bytes, {"content-type": SAFETENSORS}
        )

    def make_call(
        self, case: RequestCase, tensors: Mapping[str, HostTensor | list[HostTensor]]
    ) -> ApiCall[_Result]:
        """Make the `normserve.client` call of a case, to be sent over HTTP or shared memory.

        Args:
            tensors: by name in the API; for HTTP, a tensor that is sent in several parts is a list of these.
        """
        build: Callable[..., ApiCall[_Result]] = getattr(operations, case.operation.replace("/", "_"))
        if case.norms:
            both = ([tensors[f"{name}.{norm}"] for norm in range(case.norms)] for name in ("weight", "bias"))
            return build(tensors["x"], *both, **case.make_nondefault_client_options())
        return build(**tensors, **case.make_nondefault_client_options())

    def parse_tensors(self, case: RequestCase, answer: ApiResponse) -> dict[str, HostTensor]:
        """Parse every tensor in the body; results of several tensors are joined again."""
        tensors = answer.read_tensors()
        return join_tensors(tensors) if case.parts else tensors


def split_tensors(case: RequestCase, tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor | list[HostTensor]]:
    """Split each tensor along its first axis into a list of `case.parts` tensors.

    Weights, biases and their gradients are not split: one of each belongs to all parts.
    """
    count = case.shape[0]
    ends = [count * part // case.parts for part in range(case.parts + 1)]
    return {
        name: tensor if name.startswith(_OF_ALL) else [_slice_rows(tensor, *part) for part in pairwise(ends)]
        for name, tensor in tensors.items()
    }


def _slice_rows(tensor: HostTensor, start: int, stop: int) -> HostTensor:
    nbytes = tensor.nbytes // tensor.shape[0]
    return HostTensor(tensor.dtype, (stop - start, *tensor.shape[1:]), tensor.data[start * nbytes : stop * nbytes])


def join_tensors(tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """Concatenate tensors with one base name, such as "y.0" and "y.1", along their first axis.

    Weights, biases and their gradients are not joined, because "weight.0" belongs to a chain's first
    norm.
    """
    found: dict[str, list[HostTensor]] = {}
    for name, tensor in tensors.items():
        base, _, number = name.partition(".")
        found.setdefault(base if number and base not in _OF_ALL else name, []).append(tensor)
    return {name: parts[0] if len(parts) == 1 else _concatenate_rows(parts) for name, parts in found.items()}


def _concatenate_rows(parts: list[HostTensor]) -> HostTensor:
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return HostTensor(parts[0].dtype, shape, memoryview(b"".join([part.data for part in parts])))
