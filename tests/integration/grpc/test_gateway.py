"""The gateway as a process: started with the server and again, drained with it, and on its own."""

import os
import re
import signal
import socket

import grpc
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from normserve.grpc.schema import HEALTH, INFERENCE, REFLECTION, list_methods

from tests.certificates import Certificates
from tests.integration.grpc.requests import make_input
from tests.integration.harness.gateways import find_gateway_address, find_gateway_process, launch_gateway
from tests.integration.oip.models import random

CHECK, STATE = list_methods(HEALTH)["Check"]
SERVING, NOT_SERVING = 1, 2


def call_health(channel, method="Check", service=""):
    name = f"/{HEALTH}/{method}"
    make = channel.unary_unary if method == "Check" else channel.unary_stream
    call = make(name, request_serializer=CHECK.SerializeToString, response_deserializer=STATE.FromString)
    return call(CHECK(service=service), timeout=30)


def infer(address):
    with triton.InferenceServerClient(address) as client:
        return client.infer("layer_norm", [make_input("x", random(4, 8))]).as_numpy("y")


def test_health(address):
    with grpc.insecure_channel(address) as channel:
        for service in ("", INFERENCE, HEALTH):
            assert call_health(channel, service=service).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            call_health(channel, service="unheard of")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = call_health(channel, "Watch")
        assert next(watch).status == SERVING
        watch.cancel()


def test_reflection(address):
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {INFERENCE, HEALTH} <= set(database.get_services())
        file = database.FindFileContainingSymbol(INFERENCE)
        assert "ModelInferRequest" in [each.name for each in file.message_type]


def test_a_long_question_to_reflection_is_refused(address):
    """The response would have it twice, and no key is needed for it."""
    request, response = list_methods(REFLECTION)["ServerReflectionInfo"]
    questions = [request(list_services="x" * 2**21), request(list_services="*")]
    with grpc.insecure_channel(address) as channel:
        ask = channel.stream_stream(
            f"/{REFLECTION}/ServerReflectionInfo",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        refused, answered = ask(iter(questions), timeout=30)
    assert refused.error_response.error_code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert len(answered.list_services_response.service) == 3


def test_a_call_that_is_made_by_reflection_alone(address):
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(INFERENCE).methods_by_name["ModelInfer"]
        request, response = (GetMessageClass(each) for each in (method.input_type, method.output_type))
        x = random(4, 8)
        asked = request(model_name="layer_norm", raw_input_contents=[x.tobytes()])
        asked.inputs.add(name="x", datatype="FP32", shape=x.shape)
        message = channel.unary_unary(f"/{INFERENCE}/ModelInfer")(asked.SerializeToString(), timeout=30)
    (y,) = response.FromString(message).raw_output_contents
    assert y == infer(address).tobytes()


def test_reflection_of_what_does_not_exist(address):
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        for find in (database.FindFileContainingSymbol, database.FindFileByName):
            with pytest.raises(KeyError):
                find("unheard.of")


def test_a_request_id_and_a_trace_are_the_callers(start_server, until):
    server = start_server("--grpc-port", "0", "--access-log")
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"x-request-id": "from-afar", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    with triton.InferenceServerClient(find_gateway_address(server)) as client:
        client.infer("layer_norm", [make_input("x", random(4, 8))], headers=headers)

    def find_lines():
        return [each for each in server.log.splitlines() if "from-afar" in each and "/infer" in each]

    until(find_lines)
    (line,) = find_lines()
    assert trace in line
    assert "127.0.0.1" in line


def test_an_unknown_method(address):
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{INFERENCE}/TraceSetting")(b"", timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_one_that_dies_is_started_again(launched):
    server = launched("--grpc-port", "0")
    find_gateway_address(server)
    os.kill(find_gateway_process(server), signal.SIGKILL)
    assert infer(find_gateway_address(server, after=1)).shape == (4, 8)
    with server.client() as api:
        assert api.get("/readyz").status_code == 200
    server.terminate()
    assert server.wait() == 0
    assert "gRPC ended" not in server.log.partition("SIGTERM came")[2]


@pytest.mark.parametrize("options", [("--frontends", "2"), ("--devices", "cpu,cpu")])
def test_of_a_server_of_several_processes(start_server, options):
    server = start_server("--grpc-port", "0", *options)
    assert infer(find_gateway_address(server)).shape == (4, 8)
    with server.client() as api:
        assert 'transport="grpc",code="200"' in api.get("/metrics").text
    server.terminate()
    assert server.wait() == 0


def test_a_server_that_is_killed_takes_its_gateway_along(start_server, until):
    server = start_server("--grpc-port", "0")
    find_gateway_address(server)
    gateway = find_gateway_process(server)
    server.process.kill()

    def has_ended():
        try:
            os.kill(gateway, 0)
        except ProcessLookupError:
            return True
        return False

    until(has_ended)


@pytest.mark.parametrize("scheme", ["http", "http+unix", "https"])
def test_on_its_own_for_a_server_elsewhere(start_server, tmp_path, scheme):
    certificates, path = Certificates(tmp_path / "tls"), tmp_path / "http.sock"
    server = start_server(*(certificates.options() if scheme == "https" else ("--uds", str(path))))
    url = f"http+unix://{path}" if scheme == "http+unix" else server.url
    gateway = launch_gateway(
        "--listen", "127.0.0.1:0", "--server", url, env={"SSL_CERT_FILE": str(certificates.ca)}
    )
    try:
        address = find_gateway_address(gateway)
        assert infer(address).shape == (4, 8)
        gateway.terminate()
        assert gateway.wait() == 0
    finally:
        gateway.stop()


def test_without_its_server():
    gateway = launch_gateway("--listen", "127.0.0.1:0", "--server", "http+unix:///nonexistent/http.sock")
    try:
        address = find_gateway_address(gateway)
        with grpc.insecure_channel(address) as channel:
            assert call_health(channel).status == NOT_SERVING
        with pytest.raises(triton.InferenceServerException, match="cannot be reached") as caught:
            infer(address)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
    finally:
        gateway.stop()


@pytest.mark.parametrize("options", [(), ("--devices", "cpu,cpu")])
def test_a_port_that_is_in_use_ends_the_server(start_server, options):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = start_server("--grpc-port", port, *options, wait=False)
        assert server.wait(60) == 2
    assert f"--listen 127.0.0.1:{port}: this address cannot be listened on" in server.log


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--server", "unix:///run/normserve.sock"), "--server: the server's URL"),
        (("--server", "localhost:8000"), "--server: the URL must be"),
        (("--listen", "256.0.0.1:1"), "--listen 256.0.0.1:1: this address cannot be listened on"),
        (
            ("--listen", "127.0.0.1:65536"),
            "must be HOST:PORT with a PORT from 0 to 65535",
        ),
        (("--listen", "8001"), "--listen 8001: must be HOST:PORT"),
        (("--tls-cert", "/nonexistent.pem"), "--tls-cert: /nonexistent.pem cannot be read"),
        (("--grpc-max-message-bytes", "1"), "normserve grpc: --grpc-max-message-bytes"),
    ],
)
def test_options_that_cannot_be_used(options, expected):
    gateway = launch_gateway(*options)
    try:
        assert gateway.wait(60) == 2
    finally:
        gateway.stop()
    assert expected in re.sub(r"(?m)^[EIW]\d{4} .*\n", "", gateway.log)
