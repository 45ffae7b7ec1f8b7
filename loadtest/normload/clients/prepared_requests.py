"""Requests prepared for sending, so that creating them takes no time under load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normserve.client import HostTensor
from normserve.client.calls.api_call import ApiCall
from normserve.client.http.message_heads import encode_request_head
from normserve.client.http.server_address import ServerAddress

from normload.adapters import ProtocolAdapter
from normload.adapters.native import NativeAdapter
from normload.load.request_cases import RequestCase
from normload.load.toml_tables import ScenarioError


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A case with its tensors and encoded bytes, ready to be sent any number of times.

    Attributes:
        case, tensors: the request.
        head, parts: its bytes over HTTP; empty with shared memory.
        nbytes: size of the body, or of the tensors.
        max_response_bytes: largest possible body of a successful response, or size of its tensors.
        call: the request over shared memory; None over HTTP.
    """

    case: RequestCase
    tensors: Mapping[str, HostTensor]
    head: bytes
    parts: Sequence[bytes | memoryview]
    nbytes: int
    max_response_bytes: int
    call: ApiCall[Any] | None = None


def check_supported(adapter: ProtocolAdapter, cases: Sequence[RequestCase], address: ServerAddress) -> None:
    """Raise ScenarioError unless the adapter's servers support every case, and shared memory if the
    address needs it.

    Raises:
        ScenarioError: servers of this kind do not share memory, or do not support one of the cases.
    """
    if address.is_shared_memory and not isinstance(adapter, NativeAdapter):
        raise ScenarioError("only normserve shares memory: unix://PATH takes no other adapter")
    for case in cases:
        if refusal := adapter.find_unsupported_reason(case):
            raise ScenarioError(
                f"such a server does {refusal}; a request of {case.operation} is different: list what to send as "
                "[[workload.cases]]"
            )


def prepare_request(
    case: RequestCase, adapter: ProtocolAdapter, address: ServerAddress, api_key: str | None
) -> PreparedRequest:
    """Create the tensors of a case, and encode its HTTP request or prepare its call over shared memory."""
    tensors = case.make_tensors()
    if address.is_shared_memory:
        assert isinstance(adapter, NativeAdapter)
        return _make_shared_request(case, tensors, adapter.make_call(case, tensors))
    exchange = adapter.make_request(case, tensors)
    nbytes = sum(memoryview(part).nbytes for part in exchange.parts)
    headers = {"Host": address.host_header, "Accept-Encoding": "identity"} | dict(exchange.headers)
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    headers["Content-Length"] = str(nbytes)
    fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    head = encode_request_head(
        exchange.method.encode("ascii"), address.make_target(exchange.target).encode("ascii"), fields
    )
    return PreparedRequest(case, tensors, head, exchange.parts, nbytes, exchange.max_response_bytes)


def _make_shared_request(
    case: RequestCase, tensors: Mapping[str, HostTensor], call: ApiCall[Any]
) -> PreparedRequest:
    """Make a request to be sent over shared memory.  It holds the client's call instead of the encoded bytes of an
    HTTP request.
    """
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    most_bytes = sum(output.max_bytes for output in (call.expected_results or {}).values())
    return PreparedRequest(case, tensors, b"", (), nbytes, most_bytes, call)
