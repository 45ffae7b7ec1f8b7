"""normserve's own API: all tensors of a request, and of a response, in one safetensors body."""

from collections.abc import Callable, Mapping
from itertools import pairwise

from normserve.client import BackwardResult, ForwardResult, HostTensor
from normserve.client.answers.answer import Answer
from normserve.client.calls import operations
from normserve.client.calls.call import Call
from normserve.codec.media_types import SAFETENSORS
from normserve.codec.tensor_names import PARAMETER_GRADIENTS, PARAMETERS

from normload.adapters import Exchange
from normload.load.cases import Case

_Result = ForwardResult[HostTensor] | BackwardResult[HostTensor]

# Parameters, also of chains, and their gradients.
_OF_ALL = (*PARAMETERS, *PARAMETER_GRADIENTS)


class Native:
    """Sends and reads the same bytes as `normserve.client`."""

    def refusal(self, case: Case) -> str | None:
        """It supports everything."""
        return None

    def exchange(self, case: Case, tensors: Mapping[str, HostTensor]) -> Exchange:
        """The HTTP request of the client."""
        call = self.call(case, divided(case, tensors) if case.parts else tensors)
        return Exchange(
            call.method, call.target, call.parts() or (), call.most_bytes, {"content-type": SAFETENSORS}
        )

    def call(self, case: Case, tensors: Mapping[str, HostTensor | list[HostTensor]]) -> Call[_Result]:
        """The client's call; over shared memory, several tensors are sent as one."""
        build: Callable[..., Call[_Result]] = getattr(operations, case.operation.replace("/", "_"))
        if case.norms:
            both = ([tensors[f"{name}.{norm}"] for norm in range(case.norms)] for name in ("weight", "bias"))
            return build(tensors["x"], *both, **case.parameters())
        return build(**tensors, **case.parameters())

    def tensors(self, case: Case, answer: Answer) -> dict[str, HostTensor]:
        """Every tensor in the body; results of several tensors are joined again."""
        tensors = answer.tensors()
        return joined(tensors) if case.parts else tensors


def divided(case: Case, tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor | list[HostTensor]]:
    """Tensors of a request or a response; those with rows or samples are split into lists of `case.parts`."""
    count = case.shape[0]
    ends = [count * part // case.parts for part in range(case.parts + 1)]
    return {
        name: tensor if name.startswith(_OF_ALL) else [_rows(tensor, *part) for part in pairwise(ends)]
        for name, tensor in tensors.items()
    }


def _rows(tensor: HostTensor, start: int, stop: int) -> HostTensor:
    nbytes = tensor.nbytes // tensor.shape[0]
    return HostTensor(tensor.dtype, (stop - start, *tensor.shape[1:]), tensor.data[start * nbytes : stop * nbytes])


def joined(tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """Join numbered tensors; tensors of all parts, and those of the norms of a chain, stay unchanged."""
    found: dict[str, list[HostTensor]] = {}
    for name, tensor in tensors.items():
        base, _, number = name.partition(".")
        found.setdefault(base if number and base not in _OF_ALL else name, []).append(tensor)
    return {name: parts[0] if len(parts) == 1 else _whole(parts) for name, parts in found.items()}


def _whole(parts: list[HostTensor]) -> HostTensor:
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return HostTensor(parts[0].dtype, shape, memoryview(b"".join([part.data for part in parts])))
