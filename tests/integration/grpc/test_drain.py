"""What remains of a call at its end, its own or the server's."""

import asyncio
import os
import signal
import socket
import threading

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from normserve.grpc.schema import INFERENCE, get_message_class

from tests.integration.grpc.requests import make_input
from tests.integration.harness.gateways import find_gateway_address, find_gateway_process
from tests.integration.harness.stage import SCRIPT
from tests.integration.oip.models import random

X = random(4, 8)
SETTINGS, PING, GOAWAY = 4, 6, 7
ACKNOWLEDGED = 1


@pytest.fixture
def gated(stage_of):
    """A server whose device waits for a gate."""
    return stage_of("--grpc-port", "0")


def test_calls_in_progress_are_finished_when_the_server_ends(gated):
    address = find_gateway_address(gated.server)
    first = gated.occupy_device()
    results = []

    def infer():
        with triton.InferenceServerClient(address) as client:
            results.append(client.infer("layer_norm", [make_input("x", X)]).as_numpy("y"))

    calls = [threading.Thread(target=infer) for _ in range(3)]
    for each in calls:
        each.start()
    gated.wait_for_queue(3)
    gated.server.terminate()
    gated.until(lambda: gated.server.log.count("draining") == 2)
    with triton.InferenceServerClient(address) as late, pytest.raises(triton.InferenceServerException):
        late.infer("layer_norm", [make_input("x", X)], client_timeout=5)
    gated.open_gate()
    for each in calls:
        each.join()
    assert [np.isfinite(each).all() for each in results] == [True] * 3
    assert first.result().status_code == 200
    assert gated.server.wait() == 0


def test_sighup_does_not_end_the_gateway(gated):
    with triton.InferenceServerClient(find_gateway_address(gated.server)) as client:
        os.kill(find_gateway_process(gated.server), signal.SIGHUP)
        gated.until(lambda: "SIGHUP came and is ignored" in gated.server.log)
        assert client.is_server_ready()
    assert gated.server.log.count("gRPC is ready") == 1


@pytest.mark.parametrize("way", ["cancel", "deadline"])
def test_a_call_that_is_given_up_is_withdrawn_before_it_is_computed(gated, way):
    address = find_gateway_address(gated.server)
    first = gated.occupy_device()

    async def run():
        async with triton_aio.InferenceServerClient(address) as client:
            timeout = 1.0 if way == "deadline" else None
            calls = [
                asyncio.create_task(client.infer("layer_norm", [make_input("x", X)], client_timeout=timeout))
                for _ in range(3)
            ]
            await asyncio.to_thread(gated.wait_for_queue, 3)
            if way == "cancel":
                for each in calls:
                    each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(run())
    gated.wait_for_queue(0)
    metrics = gated.http.get("/metrics").text
    assert (
        'normserve_requests_total{op="layer_norm",pass="forward",dtype="float32",transport="grpc",code="499"} 3'
        in (metrics)
    )
    gated.open_gate()
    assert first.result().status_code == 200


def test_a_timeout_of_a_request_is_the_servers_deadline(gated):
    first = gated.occupy_device()
    with triton.InferenceServerClient(find_gateway_address(gated.server)) as client:
        with pytest.raises(triton.InferenceServerException) as caught:
            client.infer("layer_norm", [make_input("x", X)], timeout=100_000)
        assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    gated.open_gate()
    assert first.result().status_code == 200


def test_a_server_that_starts_is_not_available_yet(start_server, tmp_path):
    gate = tmp_path / "gate"
    environment = {"GATE": str(gate), "WAIT_AT_START": "1"}
    server = start_server("--grpc-port", "0", env=environment, script=SCRIPT, wait=False)
    with triton.InferenceServerClient(find_gateway_address(server)) as client:
        assert client.is_server_live()
        assert not client.is_server_ready()
        with pytest.raises(triton.InferenceServerException) as caught:
            client.infer("layer_norm", [make_input("x", X)])
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        gate.touch()
        server.wait_until_ready()
        assert client.infer("layer_norm", [make_input("x", X)]).as_numpy("y").shape == X.shape


# gRPC asks a client whether it has heard, and waits 20 s for one that says nothing.
@pytest.mark.parametrize("is_answered", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_connections_are_told_when_the_server_ends(start_server, is_answered):
    server = start_server("--grpc-port", "0")
    host, port = find_gateway_address(server).rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as raw:
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS]) + bytes(5))
        received = raw.recv(65536)
        server.terminate()
        while data := raw.recv(65536):
            received += data
            frames = dict(read_frames(received))
            if is_answered and PING in frames:
                raw.sendall(bytes([0, 0, 8, PING, ACKNOWLEDGED]) + bytes(4) + frames[PING])
                is_answered = False
    assert GOAWAY in dict(read_frames(received))
    assert server.wait() == 0


def read_frames(received):
    """HTTP/2's frames, type and content: each has nine bytes before its content, with its length and its type."""
    frames, begin = [], 0
    while begin + 9 <= len(received):
        end = begin + 9 + int.from_bytes(received[begin : begin + 3], "big")
        frames.append((received[begin + 3], received[begin + 9 : end]))
        begin = end
    return frames


def test_an_open_stream_ends_with_the_server(start_server):
    server = start_server("--grpc-port", "0")
    address = find_gateway_address(server)
    request = get_message_class("inference.ModelInferRequest")(model_name="unheard of").SerializeToString()
    ended = threading.Event()

    def send():
        yield request
        ended.wait(60)

    with grpc.insecure_channel(address) as channel:
        stream = channel.stream_stream(f"/{INFERENCE}/ModelStreamInfer")(send())
        assert b"no model" in next(stream)
        server.terminate()
        assert server.wait() == 0
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        ended.set()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
