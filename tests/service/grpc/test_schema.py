"""The messages, beside those of NVIDIA's client in one process: they have the same names, numbers and types."""

import pytest
import tritonclient.grpc.model_config_pb2 as triton_config
import tritonclient.grpc.service_pb2 as triton
from google.protobuf.descriptor_pb2 import DescriptorProto
from google.protobuf.descriptor_pool import Default
from normserve.grpc.protos.__main__ import FOLDER, compile_descriptors
from normserve.grpc.schema import INFERENCE, POOL, get_message_class, list_methods

# What Triton has beside its tensors, and this server has not.
LEFT_OUT = {"TraceSetting", "LogSettings"}


def files():
    service = POOL.FindServiceByName(INFERENCE)
    return service.file


def messages(listed):
    for each in listed:
        yield each
        yield from messages(each.nested_types)


def describe_fields(message):
    """The number, kind and type of each field by its name, and the choice that it is part of."""
    copied = DescriptorProto()
    message.CopyToProto(copied)
    choices = [each.name for each in copied.oneof_decl]
    return {
        each.name: (
            each.number,
            each.label,
            each.type,
            each.type_name,
            choices[each.oneof_index] if each.HasField("oneof_index") else None,
        )
        for each in copied.field
    }


@pytest.mark.parametrize(
    "message", list(messages(files().message_types_by_name.values())), ids=lambda each: each.full_name
)
def test_every_field_is_one_of_the_protocols(message):
    theirs = Default().FindMessageTypeByName(message.full_name)
    assert message is not theirs
    assert describe_fields(message).items() <= describe_fields(theirs).items()


@pytest.mark.parametrize("name", ["ModelInferRequest", "ModelInferResponse", "ModelStreamInferResponse"])
def test_messages_of_tensors_have_every_field(name):
    theirs = triton.DESCRIPTOR.message_types_by_name[name]
    assert {each.name for each in theirs.fields} == set(
        get_message_class(f"inference.{name}").DESCRIPTOR.fields_by_name
    )


def test_every_method_is_one_of_the_protocols():
    theirs = triton.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    ours = POOL.FindServiceByName(INFERENCE).methods_by_name
    assert set(theirs) - set(ours) == LEFT_OUT
    for name, method in ours.items():
        for part in ("input_type", "output_type"):
            assert getattr(method, part).full_name == getattr(theirs[name], part).full_name
        assert (method.client_streaming, method.server_streaming) == (
            theirs[name].client_streaming,
            theirs[name].server_streaming,
        )


def test_datatypes_have_the_protocols_numbers():
    theirs = triton_config.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    for value in files().enum_types_by_name["DataType"].values:
        assert value.number == theirs[value.name].number, value.name


def test_methods_have_their_messages():
    request, response = list_methods(INFERENCE)["ModelInfer"]
    assert (request.DESCRIPTOR.name, response.DESCRIPTOR.name) == ("ModelInferRequest", "ModelInferResponse")


def test_what_is_compiled_is_up_to_date(tmp_path):
    again = tmp_path / "services.binpb"
    assert compile_descriptors(again) == 0
    assert again.read_bytes() == (FOLDER / "services.binpb").read_bytes(), "run python -m normserve.grpc.protos"
