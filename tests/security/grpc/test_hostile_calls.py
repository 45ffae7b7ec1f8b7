"""Malformed, oversized, endless and abandoned calls: each has its answer, and the next call succeeds."""

import contextlib
import re
import socket
import threading
import time
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as triton
from normserve.grpc.schema import INFERENCE, REFLECTION, get_message_class

from tests.integration.grpc.requests import make_input
from tests.integration.harness.gateways import find_gateway_process
from tests.integration.oip.models import random
from tests.security.keys import EVERYTHING, bearing

METADATA = [("authorization", f"Bearer {EVERYTHING}")]
REQUEST = get_message_class("inference.ModelInferRequest")
RESPONSE = get_message_class("inference.ModelInferResponse")
MIB = 2**20


@pytest.fixture(autouse=True)
def still_serving(address, guarded):
    """After each attack a plain call succeeds, in the same process."""
    before = find_gateway_process(guarded)
    yield
    with triton.InferenceServerClient(address) as client:
        result = client.infer("layer_norm", [make_input("x", random(4, 8))], headers=bearing(EVERYTHING))
    assert result.as_numpy("y").shape == (4, 8)
    assert find_gateway_process(guarded) == before


@pytest.fixture
def channel(address):
    with grpc.insecure_channel(address) as channel:
        yield channel


def refused(channel, message, method="ModelInfer"):
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{INFERENCE}/{method}")(message, metadata=METADATA, timeout=60)
    return caught.value.code(), caught.value.details()


def make_request(**fields):
    return REQUEST(model_name="layer_norm", **fields)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelMetadata", "RepositoryIndex"])
@pytest.mark.parametrize("message", [b"\x0a", b"\xff" * 64, b"\x0b\x0a", b"\x0a\x02\xff\xff", b"\x00"])
def test_bytes_that_are_no_message(channel, method, message):
    assert refused(channel, message, method)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_an_oversized_message(channel):
    code, _ = refused(channel, make_request(raw_input_contents=[bytes(MIB)]).SerializeToString())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_compressed_message_that_becomes_too_large(address, guarded):
    """It is refused before it takes memory."""
    gateway = Path(f"/proc/{find_gateway_process(guarded)}")
    if not (gateway / "clear_refs").exists():
        pytest.skip("this system does not tell the peak of memory since a moment")

    def read_resident(name):
        return int(re.search(rf"{name}:\s+(\d+)", (gateway / "status").read_text(encoding="ascii"))[1]) * 1024

    message = make_request(raw_input_contents=[bytes(64 * MIB)]).SerializeToString()
    # The peak begins anew.
    (gateway / "clear_refs").write_text("5", encoding="ascii")
    before = read_resident("VmRSS")
    with grpc.insecure_channel(address, compression=grpc.Compression.Gzip) as channel:
        code, _ = refused(channel, message)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert read_resident("VmHWM") - before < 16 * MIB


def test_millions_of_empty_tensors(channel):
    code, detail = refused(channel, b"\x3a\x00" * (MIB // 2 - 64))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "fields" in detail


def test_deep_and_wide_parameters(channel):
    request = make_request()
    for place in range(20_000):
        request.parameters[f"p{place}"].int64_param = place
    assert refused(channel, request.SerializeToString())[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("shape", [[2**40, 2**40], [-1, 8], [2**62, 4, 0], [1] * 5000])
def test_shapes(channel, shape):
    request = make_request(raw_input_contents=[bytes(32)])
    request.inputs.add(name="x", datatype="FP32", shape=shape)
    code, _ = refused(channel, request.SerializeToString())
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize("datatype", ["INT8", "FP64", "BYTES", "", "fp32"])
def test_datatypes(channel, datatype):
    request = make_request(raw_input_contents=[bytes(32)])
    request.inputs.add(name="x", datatype=datatype, shape=[1, 8])
    assert refused(channel, request.SerializeToString())[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) * 10_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
        b"\x16\x03\x01\x02\x00",
    ],
)
def test_malformed_frames(address, data):
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as raw, contextlib.suppress(OSError):
        raw.sendall(data)
        while raw.recv(65536):
            pass


def test_a_flood_of_pings_is_sent_away(address):
    host, port = address.rsplit(":", 1)
    settings, ping = b"\0\0\0\x04\0\0\0\0\0", b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)
    received = b""
    with socket.create_connection((host, int(port)), timeout=10) as raw, contextlib.suppress(ConnectionError):
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + ping * 100)
        while data := raw.recv(65536):
            received += data
    assert b"too_many_pings" in received


def test_calls_that_send_no_message_leave_room_for_others(channel, address):
    """Four messages have room: as many calls that never send theirs are refused in time, or end."""
    release = threading.Event()

    def send_late():
        release.wait(30)
        yield make_request().SerializeToString()

    method = channel.stream_stream(f"/{INFERENCE}/ModelInfer")
    calls = [method(send_late(), metadata=METADATA, timeout=60) for _ in range(4)]
    time.sleep(0.3)
    code, detail = refused(channel, make_request().SerializeToString())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "memory" in detail
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live()
    for each in calls:
        each.cancel()
    release.set()


def test_calls_without_a_key_do_not_take_the_room_of_others(channel, address):
    release = threading.Event()

    def send_late():
        release.wait(30)
        yield b""

    methods = (f"/{INFERENCE}/ServerLive", "/grpc.health.v1.Health/Check", f"/{REFLECTION}/ServerReflectionInfo")
    calls = [channel.stream_stream(name)(send_late(), timeout=60) for name in methods for _ in range(20)]
    with triton.InferenceServerClient(address) as client:
        for _ in range(5):
            result = client.infer("layer_norm", [make_input("x", random(4, 8))], headers=bearing(EVERYTHING))
            assert result.as_numpy("y") is not None
    for each in calls:
        each.cancel()
    release.set()


def test_thousands_of_calls_at_once(channel):
    request = make_request(raw_input_contents=[bytes(32)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 8])
    call = channel.unary_unary(f"/{INFERENCE}/ModelInfer", response_deserializer=RESPONSE.FromString)
    message = request.SerializeToString()
    futures = [call.future(message, metadata=METADATA, timeout=120) for _ in range(2000)]
    allowed = {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
    codes = {each.code() for each in futures}
    assert codes <= allowed
    assert grpc.StatusCode.OK in codes


def test_cancelled_calls_free_their_room(channel):
    request = make_request(raw_input_contents=[bytes(MIB // 2)])
    request.inputs.add(name="x", datatype="FP32", shape=[128, 1024])
    call = channel.unary_unary(f"/{INFERENCE}/ModelInfer")
    message = request.SerializeToString()
    for _ in range(20):
        future = call.future(message, metadata=METADATA)
        time.sleep(0.002)
        future.cancel()


def test_a_client_that_does_not_read_holds_its_own_room_alone(channel, address):
    """A stream whose answers are not read is not read either."""
    request = make_request(raw_input_contents=[bytes(MIB // 2)])
    request.inputs.add(name="x", datatype="FP32", shape=[128, 1024])
    message = request.SerializeToString()
    stream = channel.stream_stream(f"/{INFERENCE}/ModelStreamInfer")(iter([message] * 64), metadata=METADATA)
    with triton.InferenceServerClient(address) as client:
        for _ in range(5):
            result = client.infer("layer_norm", [make_input("x", random(4, 8))], headers=bearing(EVERYTHING))
            assert result.as_numpy("y") is not None
    stream.cancel()
