"""`grpc.reflection.v1.ServerReflection`, also under its earlier name: what services and messages there are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from normserve.grpc.caller import Header
from normserve.grpc.calls import CallRunner
from normserve.grpc.inference_messages import parse_message
from normserve.grpc.message_budget import MessageBudget, MessageReservation
from normserve.grpc.schema import HEALTH, INFERENCE, POOL, REFLECTION, list_methods
from normserve.grpc.statuses import CallError, Code

_METHOD = "ServerReflectionInfo"
_NAMES = (REFLECTION, "grpc.reflection.v1alpha.ServerReflection")
_SERVICES = (INFERENCE, HEALTH, REFLECTION)

_REQUEST, _RESPONSE = list_methods(REFLECTION)[_METHOD]


@dataclass(frozen=True, slots=True)
class ReflectionService:
    """The description of the gateway's services.

    Attributes:
        budget: for the messages of its streams, which need no key.
    """

    budget: MessageBudget

    def make_handlers(self, calls: CallRunner) -> list[grpc.GenericRpcHandler]:
        """Make the handlers of the service under both names."""
        handler = calls.make_stream_handler(self.respond, _make_error_response, key_free_budget=self.budget)
        return [grpc.method_handlers_generic_handler(name, {_METHOD: handler}) for name in _NAMES]

    async def respond(self, message: bytes, headers: list[Header], reservation: MessageReservation) -> bytes:
        """Return the bytes of the ServerReflectionResponse to a ServerReflectionRequest.

        Raises:
            CallError: the request asks for what does not exist.
        """
        request = parse_message(_REQUEST, message)
        response = _RESPONSE(valid_host=request.host, original_request=request)
        match request.WhichOneof("message_request"):
            case "list_services":
                for name in _SERVICES:
                    response.list_services_response.service.add(name=name)
            case "file_by_filename":
                _add_files(response, POOL.FindFileByName, request.file_by_filename)
            case "file_containing_symbol":
                _add_files(response, POOL.FindFileContainingSymbol, request.file_containing_symbol)
            case _:
                raise CallError(Code.NOT_FOUND, "the protocol has no extensions of messages")
        serialised: bytes = response.SerializeToString()
        return serialised


def _add_files(response: Any, find: Callable[[str], Any], name: str) -> None:
    """Add to a response the file that is found by a name, and all that it imports.

    Raises:
        CallError: there is no such file.
    """
    try:
        waiting = [find(name)]
    except KeyError:
        raise CallError(Code.NOT_FOUND, f"there is no {name[:200]!r}") from None
    found: dict[str, bytes] = {}
    while waiting:
        file = waiting.pop(0)
        if file.name not in found:
            copied = FileDescriptorProto()
            file.CopyToProto(copied)
            found[file.name] = copied.SerializeToString()
            waiting.extend(file.dependencies)
    response.file_descriptor_response.file_descriptor_proto.extend(found.values())


def _make_error_response(message: bytes, error: CallError) -> bytes:
    """Make the response to a request that failed."""
    response = _RESPONSE()
    response.error_response.error_code = error.code.value[0]
    response.error_response.error_message = error.detail
    serialised: bytes = response.SerializeToString()
    return serialised
