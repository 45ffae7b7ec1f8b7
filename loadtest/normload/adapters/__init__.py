"""Protocols of different servers: conversion of tensors to HTTP requests, and of responses to tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from normserve.client import HostTensor
from normserve.client.responses.api_response import ApiResponse

from normload.load.request_cases import RequestCase


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """One request in a server's own HTTP protocol, as an adapter makes it for a case.

    Attributes:
        method, target: the target is a path with its query, below the server's URL.
        parts: the body in pieces.
        max_response_bytes: largest possible body of a successful response.
        headers: all but Host and Content-Length.
    """

    method: str
    target: str
    parts: Sequence[bytes | memoryview]
    max_response_bytes: int
    headers: Mapping[str, str] = field(default_factory=dict)


class ProtocolAdapter(Protocol):
    """An adapter to a server's HTTP protocol: makes requests from tensors, and reads the tensors of responses."""

    def find_unsupported_reason(self, case: RequestCase) -> str | None:
        """Return why such servers do not support the case, as a text about their limits; return None if they
        support it.
        """

    def make_request(self, case: RequestCase, tensors: Mapping[str, HostTensor]) -> AdapterRequest:
        """Make the HTTP request for a case."""

    def parse_tensors(self, case: RequestCase, answer: ApiResponse) -> dict[str, HostTensor]:
        """Return the tensors of a successful response by their names in normserve's API, as views of its body.

        Raises:
            ClientError: such a server does not send this response.
        """
