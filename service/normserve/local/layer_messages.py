"""Messages about registered layers."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from normserve.admission.client_identity import ClientIdentity
from normserve.admission.keys import KeyScope
from normserve.codec import local_messages as frames
from normserve.codec import safetensors
from normserve.codec.local_messages import Message, TensorReference
from normserve.errors import InvalidParameterError, NormserveError
from normserve.layers.layer_changes import LayerChanges
from normserve.layers.registry import LAYER_NAMES, LayerRegistry, is_layer_name
from normserve.local.local_responder import LocalExchange
from normserve.local.local_session import LocalSession
from normserve.local.operation_planner import copy_tensors
from normserve.local.segment_table import SegmentTable
from normserve.logs import audit
from normserve.memory.tensors import DeviceTensor, HostTensor
from normserve.requests.layer_requests import describe_layer, require_valid_layer_query
from normserve.requests.request_lifecycle import RequestServices

_CHANGES = frozenset([KeyScope.LAYERS])
_READS = frozenset([KeyScope.INFER, KeyScope.LAYERS])

_RESULTS = {200: "replaced", 201: "registered", 204: "removed"}

_Answer = tuple[Any, int]


@dataclass(frozen=True, slots=True)
class MessageOrigin:
    """The objects that a handler of one message needs: the connection's session and segments, and the exchange
    (message and response).

    Attributes:
        segment_table: the segments of the message's tensors.
        exchange: the message and its response.
    """

    segment_table: SegmentTable
    session: LocalSession
    exchange: LocalExchange

    def authorise(self, sufficient_scopes: Set[KeyScope]) -> ClientIdentity:
        """Return the client's identity if its key has one of the needed scopes; raise an error if not."""
        return self.session.authorise(sufficient_scopes, self.exchange)


@dataclass(frozen=True, slots=True)
class LayerMessageDispatcher:
    """The handler of messages that list, describe, register or delete layers, that is, norms with stored
    parameters.

    Attributes:
        request_services: the services that all requests use.
    """

    request_services: RequestServices
    layers: LayerRegistry
    layer_changes: LayerChanges

    async def handle_message(self, message: Message, sender: MessageOrigin) -> _Answer:
        """Handle a message about registered layers; return the response's JSON document and its status.

        Raises:
            NormserveError: the message is invalid or not permitted.
        """
        layers = self.layers
        match message:
            case frames.ListLayersMessage():
                sender.authorise(_READS)
                return {"layers": [describe_layer(layer) for layer in layers.list_layers()]}, 200
            case frames.GetLayerMessage():
                sender.authorise(_READS)
                return describe_layer(layers.get(message.name)), 200
            case frames.DeleteLayerMessage():
                return await self._authorise_and_audit_change("DELETE", message, sender, self._delete_layer)
            case frames.PutLayerMessage():
                return await self._authorise_and_audit_change("PUT", message, sender, self._register_layer)
            case _:
                raise AssertionError(f"{message} is no message about layers")

    async def _delete_layer(self, message: Any, sender: MessageOrigin) -> _Answer:
        """Remove the registered layer that the message names; return no document and status 204."""
        sender.exchange.mark_in_progress()
        await self.layer_changes.remove(message.name)
        return None, 204

    async def _register_layer(self, message: Any, sender: MessageOrigin) -> _Answer:
        """Copy the layer's parameters from the client's shared memory and register the layer.  Return its
        description and status 201, or 200 if it replaced one.
        """
        if not is_layer_name(message.name):
            raise InvalidParameterError(f"a layer's name must be {LAYER_NAMES}")
        query = message.query.encode()
        require_valid_layer_query(query)
        self.request_services.engine.require_ready()
        arena, exchange = sender.segment_table, sender.exchange
        nbytes = sum([len(tensor.data) for tensor in _find_parameters(arena, message.tensors).values()])
        permit = exchange.acquire_permit(nbytes)
        try:
            exchange.charge_body_copy(nbytes)
            body = memoryview(b"".join(safetensors.encode(copy_tensors(_find_parameters(arena, message.tensors)))))
            exchange.mark_in_progress()
            layer, replaced = await self.layer_changes.register_or_replace(message.name, query, body)
        finally:
            permit.release()
        return describe_layer(layer), 200 if replaced else 201

    async def _authorise_and_audit_change(
        self, method: str, message: Any, sender: MessageOrigin, change: Callable[..., Any]
    ) -> _Answer:
        """Check that the client may change layers, call `change`, and write the outcome to the audit log."""
        caller = sender.authorise(_CHANGES)
        result = "interrupted"
        try:
            document, status = await change(message, sender)
            result = _RESULTS[status]
        except NormserveError as error:
            result = error.code
            raise
        finally:
            who = {"key": caller.key, "address": caller.address, "request_id": sender.exchange.request_id}
            audit.log_layer_change(method, f"/v1/layers/{message.name}", result, **who)
        return document, status


def _find_parameters(arena: SegmentTable, located: Mapping[str, TensorReference]) -> dict[str, HostTensor]:
    """Return views of a layer's parameters in the client's shared memory, by name.

    Raises:
        InvalidParameterError: a tensor is in device memory, or invalid.
    """
    tensors = {name: arena.find_tensor(name, each)[0] for name, each in located.items()}
    if any(isinstance(tensor, DeviceTensor) for tensor in tensors.values()):
        raise InvalidParameterError("a layer's parameters must be in host memory, they are not")
    return tensors
