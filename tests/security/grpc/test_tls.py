"""TLS with the server's files, which may be renewed, and with certificates of clients."""

import socket

import grpc
import pytest
import tritonclient.grpc as triton

from tests.certificates import Certificates
from tests.integration.grpc.requests import make_input
from tests.integration.harness.gateways import find_gateway_address
from tests.integration.oip.models import random


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def address(launched, ours):
    return find_gateway_address(launched("--grpc-port", "0", *ours.options(), "--tls-client-ca", str(ours.ca)))


def connect(address, ours, *, certificate=True):
    pem = ours.client.read_bytes() if certificate else None
    credentials = grpc.ssl_channel_credentials(ours.ca.read_bytes(), pem, pem)
    return triton.InferenceServerClient(address, creds=credentials)


def test_a_client_with_a_certificate(address, ours):
    with connect(address, ours) as client:
        assert client.infer("layer_norm", [make_input("x", random(4, 8))]).as_numpy("y").shape == (4, 8)


def test_a_client_without_one(address, ours):
    with connect(address, ours, certificate=False) as client, pytest.raises(triton.InferenceServerException):
        client.is_server_live(client_timeout=5)


def test_a_client_without_tls(address):
    with triton.InferenceServerClient(address) as client, pytest.raises(triton.InferenceServerException):
        client.is_server_live(client_timeout=5)


def test_renewed_files_are_used(address, ours):
    host, port = address.rsplit(":", 1)
    context = ours.trust(client=ours.client)
    context.set_alpn_protocols(["h2"])

    def get_serial():
        raw = socket.create_connection((host, int(port)), timeout=10)
        with context.wrap_socket(raw, server_hostname="127.0.0.1") as secured:
            return secured.getpeercert()["serialNumber"]

    assert get_serial() == ours.serial()
    ours.renew()
    assert get_serial() == ours.serial()
