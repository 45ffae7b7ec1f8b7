"""normserve's own API: every tensor in one safetensors body, and every answer one."""

from collections.abc import Callable, Mapping
from urllib.parse import urlencode

from normserve.client import BackwardResult, ForwardResult, HostTensor, operations
from normserve.client.protocol import Answer, Call

from normload.adapters import Exchange
from normload.load.cases import Case

_Result = ForwardResult[HostTensor] | BackwardResult[HostTensor]


class Native:
    """Sends what `normserve.client` sends, and reads what it reads."""

    def refusal(self, case: Case) -> str | None:
        """It can be asked everything."""
        return None

    def exchange(self, case: Case, tensors: Mapping[str, HostTensor]) -> Exchange:
        """What the client would send."""
        call = _call(case, tensors)
        target = call.path + ("?" + urlencode(call.params) if call.params else "")
        headers = {name: value for name, value in call.headers.items() if name != "content-length"}
        return Exchange(call.method, target, call.parts or (), call.most_bytes, headers)

    def tensors(self, case: Case, answer: Answer) -> dict[str, HostTensor]:
        """Every tensor in the body."""
        return answer.tensors()


def _call(case: Case, tensors: Mapping[str, HostTensor]) -> Call[_Result]:
    build: Callable[..., Call[_Result]] = getattr(operations, case.operation.replace("/", "_"))
    return build(**tensors, **case.parameters())
