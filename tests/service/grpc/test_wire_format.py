"""Large tensors stay where they lie in a message's bytes, and other bytes are refused."""

import pytest
import tritonclient.grpc.service_pb2 as triton
from normserve.grpc.statuses import CallError, Code
from normserve.grpc.wire_format import join_response, split_request


def make_request(*tensors: bytes) -> bytes:
    request = triton.ModelInferRequest(model_name="layer_norm", id="7", raw_input_contents=tensors)
    for place in range(len(tensors)):
        request.inputs.add(name=f"x{place}", datatype="FP32", shape=[2, 3])
    request.parameters["eps"].double_param = 1e-3
    return request.SerializeToString()


@pytest.mark.parametrize("tensors", [(), (b"",), (b"abc",), (b"abc", b"", b"d" * 300), (b"x" * 2**21,)])
def test_tensors_are_views_of_the_message(tensors):
    message = make_request(*tensors)
    head, found = split_request(message)
    assert [bytes(each) for each in found] == list(tensors)
    assert all(each.obj is message for each in found)
    rest = triton.ModelInferRequest.FromString(head)
    assert not rest.raw_input_contents
    assert rest == triton.ModelInferRequest.FromString(make_request()) or len(rest.inputs) == len(tensors)
    assert (rest.model_name, rest.id, rest.parameters["eps"].double_param) == ("layer_norm", "7", 1e-3)


def test_fields_may_stand_in_any_order():
    one, other = make_request(b"one"), triton.ModelInferRequest(raw_input_contents=[b"other"]).SerializeToString()
    _, found = split_request(other + one + other)
    assert [bytes(each) for each in found] == [b"other", b"one", b"other"]


@pytest.mark.parametrize("tensors", [(), (b"",), (b"abc", b"", b"d" * 300), (memoryview(b"y" * 2**21),)])
def test_a_response_is_what_protobuf_makes(tensors):
    head = triton.ModelInferResponse(model_name="layer_norm", id="7")
    joined = join_response(head.SerializeToString(), tensors)
    head.raw_output_contents.extend(map(bytes, tensors))
    assert triton.ModelInferResponse.FromString(joined) == head


@pytest.mark.parametrize(
    "message",
    [
        b"\x3a",  # no length
        b"\x3a\x05abc",  # a length beyond the end
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # a length of 2^69
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",  # an endless number
        b"\x00\x00",  # the field 0
        b"\x3b\x00",  # a group
        b"\x3f",  # an unknown kind
        b"\x39abc",  # half a number of eight bytes
        b"\x80",  # half a key
    ],
)
def test_bytes_that_are_no_message_are_refused(message):
    for given in (message, make_request(b"abc") + message):
        with pytest.raises(CallError) as caught:
            split_request(given)
        assert caught.value.code is Code.INVALID_ARGUMENT


def test_millions_of_empty_tensors_are_refused_early():
    bomb = b"\x3a\x00" * 2**24
    with pytest.raises(CallError, match="at most 1024 fields"):
        split_request(bomb)


def test_a_long_head_is_refused_before_it_is_parsed():
    request = triton.ModelInferRequest()
    request.inputs.add(name="x").contents.fp32_contents.extend([1.0] * 2**21)
    with pytest.raises(CallError, match="raw_input_contents") as caught:
        split_request(request.SerializeToString())
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
