"""Connections and streams that are held, flooded or not read: each is bounded, and lets others through."""

import contextlib
import random
import re
import socket
import time
from pathlib import Path

import grpc
import pytest
from normserve.grpc.schema import HEALTH, INFERENCE, REFLECTION, get_message_class

from tests.integration.harness.gateways import find_gateway_address, launch_gateway

Code = grpc.StatusCode
REQUEST = get_message_class("inference.ModelInferRequest")
REFUSED = {Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE}
MIB = 2**20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000 04 00 00000000")
MAX_CONNECTIONS = 16
# Of each channel its own connection, with which it reads as little as flow control has it at first.
OWN = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0), ("grpc.max_receive_message_length", -1)]


@pytest.fixture(scope="module")
def gateway(server):
    """A gateway with short times, room for four messages of 1 MiB, and 16 connections."""
    limits = ("--grpc-max-message-bytes", "1MiB", "--max-inflight-bytes", "4MiB", "--max-connections")
    times = ("--header-timeout-s", "1", "--keep-alive-s", "2", "--body-timeout-s", "2", "--send-timeout-s", "1")
    own = ("--listen", "127.0.0.1:0", "--server", server.url)
    running = launch_gateway(*own, *limits, str(MAX_CONNECTIONS), *times)
    try:
        find_gateway_address(running)
        yield running
    finally:
        running.stop()


@pytest.fixture
def address(gateway):
    return find_gateway_address(gateway)


@pytest.fixture(autouse=True)
def still_serving(gateway, address, until):
    """After each attack a plain call succeeds, and nothing has failed unforeseen."""
    yield

    def succeeds():
        with grpc.insecure_channel(address, options=OWN) as channel, contextlib.suppress(grpc.RpcError):
            return bool(infer(channel))
        return False

    until(succeeds)
    assert not re.search("Traceback|failed in the gateway", gateway.log), gateway.log


def make_message(nbytes=32):
    request = REQUEST(model_name="layer_norm", raw_input_contents=[bytes(nbytes)])
    request.inputs.add(name="x", datatype="FP32", shape=[nbytes // 32, 8])
    return request.SerializeToString()


def infer(channel, nbytes=32):
    return channel.unary_unary(f"/{INFERENCE}/ModelInfer")(make_message(nbytes), timeout=30)


@contextlib.contextmanager
def open_channels(address, count):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(grpc.insecure_channel(address, options=OWN)) for _ in range(count)]


def connect(address):
    """A connection that has begun to speak HTTP/2."""
    host, port = address.rsplit(":", 1)
    raw = socket.create_connection((host, int(port)), timeout=10)
    with contextlib.suppress(ConnectionError):
        raw.sendall(PREFACE)
    return raw


def is_open(raw):
    try:
        return bool(raw.recv(65536))
    except ConnectionError:
        return False


def wait_for_end(raw):
    with contextlib.suppress(ConnectionError):
        while raw.recv(65536):
            pass


def is_answered(call):
    with contextlib.suppress(grpc.RpcError):
        return next(call, None) is not None
    return False


def send_never():
    time.sleep(30)
    yield b""


def test_connections_beyond_the_limit_are_closed(address):
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(connect(address)) for _ in range(2 * MAX_CONNECTIONS)]
        assert 0 < sum(map(is_open, opened)) <= MAX_CONNECTIONS


@pytest.mark.parametrize("data", [b"", PREFACE[:10]])
def test_a_connection_that_says_nothing_is_closed(address, data):
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(data)
        wait_for_end(raw)


def test_a_connection_without_calls_is_closed_and_its_client_need_not_know(address):
    with connect(address) as raw, grpc.insecure_channel(address, options=OWN) as channel:
        infer(channel)
        wait_for_end(raw)
        infer(channel)


def test_a_client_that_does_not_read_loses_its_connection(address, until):
    """Its responses do not fit into what it lets gRPC send; until then they have all the room there is."""
    method = f"/{INFERENCE}/ModelInfer"
    message = make_message(MIB - 1024)
    with open_channels(address, 4) as channels, grpc.insecure_channel(address, options=OWN) as other:
        calls = [channel.stream_stream(method)(iter([message])) for channel in channels]
        until(lambda: all(each.done() for each in calls))
        assert {each.code() for each in calls} <= REFUSED
        assert Code.UNAVAILABLE in {each.code() for each in calls}
        infer(other, MIB // 2)


def test_a_call_whose_message_does_not_come_ends(address):
    for method in (f"/{INFERENCE}/ModelInfer", f"/{INFERENCE}/ServerLive", f"/{REFLECTION}/ServerReflectionInfo"):
        with grpc.insecure_channel(address, options=OWN) as channel:
            call = channel.stream_stream(method)(send_never())
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.code() is Code.DEADLINE_EXCEEDED, method


def test_streams_do_not_take_the_room_of_calls(address, until):
    """Half of the room for four messages is for streams."""
    with open_channels(address, 5) as channels:
        streams = [each.stream_stream(f"/{INFERENCE}/ModelStreamInfer")(send_never()) for each in channels[:4]]
        until(lambda: sum(each.done() for each in streams) == 2)
        assert [each.code() for each in streams if each.done()] == [Code.RESOURCE_EXHAUSTED] * 2
        assert infer(channels[4])
        for each in streams:
            each.cancel()


def test_only_so_many_watch_the_health(address, until):
    with grpc.insecure_channel(address, options=OWN) as channel:
        watches = [channel.unary_stream(f"/{HEALTH}/Watch")(b"") for _ in range(80)]
        until(lambda: sum(each.done() for each in watches) == 80 - 64)
        assert {each.code() for each in watches if each.done()} == {Code.RESOURCE_EXHAUSTED}
        for each in watches:
            each.cancel()


def test_a_flood_of_messages_that_nobody_receives_takes_little_memory(address, gateway):
    message = make_message(MIB - 1024)

    def read_resident():
        status = Path(f"/proc/{gateway.process.pid}/status").read_text(encoding="ascii")
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024

    before = read_resident()
    with open_channels(address, 8) as channels:
        methods = [f"/{INFERENCE}/{name}" for name in ("ModelInfer", "ServerLive", "ModelStreamInfer")]
        calls = [
            channel.stream_stream(method)(iter([message] * 2))
            for _ in range(16)
            for channel in channels
            for method in methods
        ]
        highest = 0
        for _ in range(30):
            highest = max(highest, read_resident())
            time.sleep(0.1)
        assert any(map(is_answered, calls))
        for each in calls:
            each.cancel()
    # Room for four messages of calls and four of probes, of each what gRPC holds beside it, and 64 KiB a call.
    assert highest - before < 128 * MIB


@pytest.mark.parametrize(("size", "allowed"), [(10_000, {Code.OK}), (40_000, REFUSED), (400_000, REFUSED)])
def test_long_metadata(address, size, allowed):
    with grpc.insecure_channel(address, options=OWN) as channel:
        metadata = [("x-filler", "a" * size)]
        call = channel.unary_unary(f"/{INFERENCE}/ServerLive").future(b"", metadata=metadata, timeout=10)
        assert call.code() in allowed


def test_random_and_truncated_messages(address):
    """Whatever the bytes are, the status is one of a client's error, or the message is one."""
    chance = random.Random(7)
    whole = make_message(256)
    messages = [whole[: chance.randrange(len(whole))] for _ in range(10)]
    messages += [chance.randbytes(chance.randrange(1, 200)) for _ in range(20)]
    for _ in range(20):
        changed = bytearray(whole)
        for _ in range(3):
            changed[chance.randrange(60)] = chance.randrange(256)
        messages.append(bytes(changed))
    allowed = {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED}
    names = ("ModelInfer", "ModelMetadata", "RepositoryModelLoad", "SystemSharedMemoryRegister", "ServerLive")
    with grpc.insecure_channel(address, options=OWN) as channel:
        for method in [f"/{INFERENCE}/{name}" for name in names] + [f"/{HEALTH}/Check"]:
            calls = [channel.unary_unary(method).future(each, timeout=30) for each in messages]
            assert {each.code() for each in calls} <= allowed, method
        for method in (f"/{INFERENCE}/ModelStreamInfer", f"/{REFLECTION}/ServerReflectionInfo"):
            answers = list(channel.stream_stream(method)(iter(messages), timeout=30))
            assert len(answers) == len(messages), method


def test_thousands_of_questions_in_a_stream_of_reflection(address):
    request = get_message_class("grpc.reflection.v1.ServerReflectionRequest")
    questions = [
        request(file_containing_symbol=INFERENCE),
        request(file_by_filename="x" * 60_000),
        request(list_services="*"),
        request(),
    ]
    with grpc.insecure_channel(address, options=OWN) as channel:
        method = channel.stream_stream(f"/{REFLECTION}/ServerReflectionInfo")
        sent = (questions[place % 4].SerializeToString() for place in range(2000))
        assert sum(1 for _ in method(sent, timeout=60)) == 2000
