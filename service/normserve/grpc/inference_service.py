"""`GRPCInferenceService`: each method is one request to the server."""

import contextlib
from dataclasses import dataclass

import grpc

from normserve.grpc.caller import Header
from normserve.grpc.calls import CallRunner
from normserve.grpc.document_methods import ROUTES, DocumentMethod
from normserve.grpc.inference_messages import (
    JSON_LENGTH,
    convert_request,
    convert_response,
    parse_message,
)
from normserve.grpc.message_budget import MessageReservation
from normserve.grpc.schema import INFERENCE, get_message_class
from normserve.grpc.server_client import ServerClient
from normserve.grpc.statuses import CallError
from normserve.grpc.wire_format import encode_key, join_response, split_request

_REQUEST = get_message_class("inference.ModelInferRequest")
_STREAM_RESPONSE = get_message_class("inference.ModelStreamInferResponse")
_INFER_RESPONSE_FIELD = 2

_PROBES = ("ServerLive", "ServerReady")
_TENSORS, _STREAM = "ModelInfer", "ModelStreamInfer"


@dataclass(frozen=True, slots=True)
class InferenceService:
    """The methods of the inference protocol, as requests to the server."""

    server: ServerClient

    def make_handlers(self, calls: CallRunner) -> grpc.GenericRpcHandler:
        """Make the handlers of all methods."""
        handlers = {
            name: calls.make_handler(DocumentMethod(self.server, name), is_probe=name in _PROBES) for name in ROUTES
        }
        handlers[_TENSORS] = calls.make_handler(self.infer, has_tensors=True)
        handlers[_STREAM] = calls.make_stream_handler(self.infer_in_stream, _make_stream_error)
        return grpc.method_handlers_generic_handler(INFERENCE, handlers)

    async def infer(self, message: bytes, headers: list[Header], reservation: MessageReservation) -> bytes:
        """Have the server compute a ModelInferRequest, and return the bytes of the ModelInferResponse."""
        head, tensors = await self._infer(message, headers, reservation)
        return join_response(head, tensors)

    async def infer_in_stream(
        self, message: bytes, headers: list[Header], reservation: MessageReservation
    ) -> bytes:
        """Do the same for a message of a stream, and return the bytes of a ModelStreamInferResponse."""
        head, tensors = await self._infer(message, headers, reservation)
        nbytes = len(head) + sum(len(encode_key(1, len(each))) + len(each) for each in tensors)
        return join_response(encode_key(_INFER_RESPONSE_FIELD, nbytes) + head, tensors)

    async def _infer(
        self, message: bytes, headers: list[Header], reservation: MessageReservation
    ) -> tuple[bytes, list[memoryview]]:
        """Send an inference request, and convert its response as `convert_response` does."""
        request = convert_request(message)
        own = [
            (b"Content-Type", b"application/octet-stream"),
            (JSON_LENGTH, b"%d" % len(request.json)),
            *headers,
        ]
        # The response is usually as long as the request; further calls must not get its room before it arrives.
        reservation.resize(3 * len(message))
        response = await self.server.request("POST", request.path, own, [request.json, *request.tensors])
        # The request, the server's response and the message that is made of it.
        reservation.resize(len(message) + 2 * response.nbytes)
        return convert_response(response)


def _make_stream_error(message: bytes, error: CallError) -> bytes:
    """Make the response to a message of a stream that failed, with the message's id if it has one."""
    response = _STREAM_RESPONSE(error_message=error.detail or error.code.name)
    with contextlib.suppress(CallError):
        head, _ = split_request(message)
        response.infer_response.id = parse_message(_REQUEST, head).id
    serialised: bytes = response.SerializeToString()
    return serialised
