"""The messages and services of the protocol, in a descriptor pool of their own.

In protobuf's default pool they would clash with those of `tritonclient.grpc` in the same process.
"""

from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

INFERENCE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1.ServerReflection"
"""The full names of the services."""


def _load_pool() -> DescriptorPool:
    """Load the compiled descriptors into a new pool."""
    compiled = Path(__file__).parent / "protos" / "services.binpb"
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(compiled.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _load_pool()


def get_message_class(name: str) -> Any:
    """Return the class of a message of the protocol, by its full name."""
    return GetMessageClass(POOL.FindMessageTypeByName(name))


def list_methods(service: str) -> dict[str, tuple[Any, Any]]:
    """List the methods of a service: the classes of request and response by the method's name."""
    methods = POOL.FindServiceByName(service).methods
    return {each.name: (GetMessageClass(each.input_type), GetMessageClass(each.output_type)) for each in methods}
