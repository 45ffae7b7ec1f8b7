"""Keys over gRPC, and who may say on whose behalf it calls."""

import contextlib
import threading

import grpc
import httpx
import pytest
import tritonclient.grpc as triton
from normserve.codec.gateway_header import GATEWAY_CALLER
from normserve.grpc.schema import INFERENCE, list_methods

from tests.integration.grpc.requests import make_input
from tests.integration.oip.models import random
from tests.security.keys import EVERYTHING, EXPIRED, INFER, LAYERS, METRICS, SLOW, bearing

X = random(4, 8)
PUBLIC = ("ServerLive", "ServerReady")


def infer(address, key, **options):
    with triton.InferenceServerClient(address) as client:
        return client.infer("layer_norm", [make_input("x", X)], headers=bearing(key), **options)


@pytest.mark.parametrize(
    ("key", "status"),
    [
        (None, "UNAUTHENTICATED"),
        ("guessed", "UNAUTHENTICATED"),
        (EXPIRED, "UNAUTHENTICATED"),
        (METRICS, "PERMISSION_DENIED"),
        (LAYERS, "PERMISSION_DENIED"),
    ],
)
def test_calls_with_other_keys_are_refused(address, key, status):
    with pytest.raises(triton.InferenceServerException) as caught:
        infer(address, key)
    assert caught.value.status() == f"StatusCode.{status}"


@pytest.mark.parametrize("key", [INFER, EVERYTHING])
def test_calls_with_a_sufficient_key(address, key):
    assert infer(address, key).as_numpy("y").shape == X.shape


@pytest.mark.parametrize("method", list_methods(INFERENCE))
def test_only_probes_need_no_key(address, method):
    request, _ = list_methods(INFERENCE)[method]
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{INFERENCE}/{method}")(iter([request().SerializeToString()]), timeout=30)
        if method in PUBLIC:
            assert len(list(call)) == 1
            return
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_call_without_a_key_is_refused_before_its_message_is_sent(address):
    sent = threading.Event()

    def send_never():
        sent.wait(30)
        yield b""

    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{INFERENCE}/ModelInfer")(send_never(), timeout=30)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert not sent.is_set()
        sent.set()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_rate_has_a_retry_delay(address):
    with grpc.insecure_channel(address) as channel:
        metadata = [("authorization", f"Bearer {SLOW}")]
        call = channel.unary_unary(f"/{INFERENCE}/ServerMetadata")
        with contextlib.suppress(grpc.RpcError):
            for _ in range(3):
                call(b"", metadata=metadata, timeout=30)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", metadata=metadata, timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailer = dict(caught.value.trailing_metadata())
    assert int(trailer["grpc-retry-pushback-ms"]) >= 1000
    assert b"RetryInfo" in trailer["grpc-status-details-bin"]


def test_a_change_is_logged_with_the_callers_address_and_key(address, guarded, until):
    with triton.InferenceServerClient(address) as client, pytest.raises(triton.InferenceServerException):
        client.unload_model("unheard of", headers=bearing(EVERYTHING))
    until(lambda: "unheard" in guarded.log)
    line = next(each for each in guarded.log.splitlines() if "normserve.audit" in each and "unheard" in each)
    assert "address=127.0.0.1" in line
    assert "key=root" in line


def test_other_clients_cannot_call_on_behalf_of_others(guarded, until):
    with guarded.client() as api:
        name = {GATEWAY_CALLER.decode(): "10.1.2.3", **bearing(EVERYTHING)}
        api.delete("/v1/layers/nothing", headers=name)
    until(lambda: "/v1/layers/nothing" in guarded.log)
    assert "10.1.2.3" not in guarded.log


def test_on_the_unix_socket_the_servers_own_user_can(start_server, tmp_path, until):
    path = tmp_path / "http.sock"
    server = start_server("--uds", str(path))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as api:
        api.delete("/v1/layers/nothing", headers={GATEWAY_CALLER.decode(): "10.1.2.3"})
    until(lambda: "/v1/layers/nothing" in server.log)
    assert "address=10.1.2.3" in server.log
