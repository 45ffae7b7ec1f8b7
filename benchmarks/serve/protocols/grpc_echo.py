"""A server of `ModelInfer` that returns x as y: what gRPC in Python takes by itself.

usage: python -m benchmarks.serve.protocols.grpc_echo PORT
"""

import asyncio
import sys

import grpc
import uvloop
from grpc import aio
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


async def serve(port: str) -> None:
    """Respond to each request as to the first of its length, which alone is parsed."""
    responses: dict[int, bytes] = {}

    async def respond(message: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        if len(message) not in responses:
            request = ModelInferRequest.FromString(message)
            response = ModelInferResponse(raw_output_contents=request.raw_input_contents)
            response.outputs.add(name="y", datatype="FP32", shape=request.inputs[0].shape)
            responses[len(message)] = response.SerializeToString()
        return responses[len(message)]

    server = aio.server(options=_UNLIMITED)
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(respond)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),)
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
