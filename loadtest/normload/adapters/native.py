"""normserve's own API: every tensor in one safetensors body, and every answer one."""

from collections.abc import Callable, Mapping

from normserve.client import BackwardResult, ForwardResult, HostTensor
from normserve.client.answers.answer import Answer
from normserve.client.calls import operations
from normserve.client.calls.call import Call
from normserve.codec.media_types import SAFETENSORS

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
        call = self.call(case, tensors)
        return Exchange(
            call.method, call.target, call.parts() or (), call.most_bytes, {"content-type": SAFETENSORS}
        )

    def call(self, case: Case, tensors: Mapping[str, HostTensor]) -> Call[_Result]:
        """What the client would be asked for."""
        build: Callable[..., Call[_Result]] = getattr(operations, case.operation.replace("/", "_"))
        if case.norms:
            both = ([tensors[f"{name}.{norm}"] for norm in range(case.norms)] for name in ("weight", "bias"))
            return build(tensors["x"], *both, **case.parameters())
        return build(**tensors, **case.parameters())

    def tensors(self, case: Case, answer: Answer) -> dict[str, HostTensor]:
        """Every tensor in the body."""
        return answer.tensors()
