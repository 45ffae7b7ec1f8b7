"""Protocols of different servers: from the tensors of a request to HTTP, and from the response to tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from normserve.client import HostTensor
from normserve.client.answers.answer import Answer

from normload.load.cases import Case


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request as HTTP has it.

    Attributes:
        method, target: the target is a path with its query, below the server's URL.
        parts: the body in pieces.
        most_bytes: what the body of a successful answer can have.
        headers: besides Host and Content-Length.
    """

    method: str
    target: str
    parts: Sequence[bytes | memoryview]
    most_bytes: int
    headers: Mapping[str, str] = field(default_factory=dict)


class Adapter(Protocol):
    """A protocol for tensors."""

    def refusal(self, case: Case) -> str | None:
        """What such servers are limited to, if the case is beyond that; None if they support it."""

    def exchange(self, case: Case, tensors: Mapping[str, HostTensor]) -> Exchange:
        """What to send."""

    def tensors(self, case: Case, answer: Answer) -> dict[str, HostTensor]:
        """The tensors of a successful response by the names of normserve's API, as views of it.

        Raises:
            ClientError: it is none that such a server gives.
        """
