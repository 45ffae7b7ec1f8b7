"""The room that an inference takes in the gateway."""

import asyncio

import pytest
from normserve.grpc.inference_service import InferenceService
from normserve.grpc.message_budget import MessageBudget
from normserve.grpc.schema import get_message_class
from normserve.grpc.statuses import CallError, Code

REQUEST = get_message_class("inference.ModelInferRequest")


class BusyServer:
    """A server that refuses every request, and notes how much room there is in the gateway meanwhile."""

    def __init__(self, budget):
        self.budget = budget
        self.free_bytes = []

    async def request(self, method, path, headers, parts):
        self.free_bytes.append(self.budget.free_bytes)
        raise CallError(Code.UNAVAILABLE, "busy", 1.0)


def test_the_response_has_room_before_the_request_is_sent():
    """A response is usually as long as its request, and is in memory twice."""
    budget = MessageBudget(2**20, 2**20, 0)
    server = BusyServer(budget)
    request = REQUEST(model_name="layer_norm", raw_input_contents=[bytes(1024)])
    request.inputs.add(name="x", datatype="FP32", shape=[32, 8])
    message = request.SerializeToString()

    async def infer():
        with await budget.reserve("a") as reservation:
            reservation.resize(len(message))
            await InferenceService(server).infer(message, [], reservation)

    with pytest.raises(CallError):
        asyncio.run(infer())
    assert server.free_bytes == [2**20 - 3 * len(message)]
    assert budget.free_bytes == 2**20
