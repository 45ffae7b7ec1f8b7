"""A fleet, attacked from outside: clients that pose as one of its processes, and names that files confuse."""

import contextlib
import socket

import httpx
import pytest
import torch

from tests.integration.harness.fleets import assert_right, layers, normalised, on_each, processes, put
from tests.integration.harness.raw import exchange
from tests.integration.harness.wire import assert_problem

WEIGHTS = torch.linspace(1, 2, 12)
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def uds(tmp_path_factory):
    # Named as the sockets are by which the processes reach one another.
    return tmp_path_factory.mktemp("fleet") / "0.sock"


@pytest.fixture(scope="module")
def fleet(launched, uds):
    return launched("--devices", "cpu,cpu", "--uds", str(uds), env={"NORMSERVE_API_KEY": "secret"})


@pytest.fixture
def api(fleet):
    with httpx.Client(base_url=fleet.url, headers=KEY, timeout=60, verify=False) as client:
        yield client


@pytest.fixture
def outside(uds):
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(uds), verify=False), base_url="http://localhost", timeout=60
    ) as client:
        yield client


POSING = [
    {"host": "sibling"},
    {"host": "0.sock"},
    {"x-forwarded-host": "sibling", "x-forwarded-for": "unix:", "forwarded": "for=_sibling;host=sibling"},
]


@pytest.mark.parametrize("headers", POSING, ids=["host", "path", "forwarded"])
@pytest.mark.parametrize("way", ["outside", "tcp"])
def test_no_header_makes_a_client_one_of_the_fleet(fleet, outside, headers, way):
    client = outside if way == "outside" else httpx.Client(base_url=fleet.url, verify=False)
    with client if way == "tcp" else contextlib.nullcontext():
        for method, path in (("GET", "/v1/info"), ("PUT", "/v1/layers/a?op=rms_norm"), ("DELETE", "/v1/layers/a")):
            refused = client.request(method, path, headers=headers)
            # By its key, or by its Host already.
            assert 400 <= refused.status_code < 500
            assert_problem(refused, refused.status_code)
        # One of the fleet would be told of one process alone.
        metrics = client.get("/metrics", headers=headers)
        assert metrics.status_code >= 400 or 'normserve_process_up{process="1"} 1.0' in metrics.text
        info = client.get("/v1/info", headers={**headers, **KEY})
        assert info.status_code >= 400 or len(info.json()["processes"]) == 2


def test_no_header_has_a_layer_registered_in_one_process_alone(outside, api, fleet):
    try:
        outside.headers.update({**POSING[-1], **KEY})
        assert put(outside, "posed").status_code == 201
        for held in on_each(fleet.url, layers_of):
            assert [each["name"] for each in held] == ["posed"]
    finally:
        assert api.delete("/v1/layers/posed").status_code == 204


def layers_of(client) -> list[dict]:
    client.headers.update(KEY)
    return layers(client)


def test_what_the_processes_say_to_one_another_is_no_http(fleet, uds):
    question = b'\0\0\0\x10{"do":"metrics"}'
    assert exchange(fleet.address, question).status_code == 400
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(uds))
        client.sendall(question)
        assert client.recv(100).startswith(b"HTTP/1.1 400")


def test_names_that_differ_by_case_or_dots_are_apart_in_every_process(fleet, api):
    names = ["Case", "case", "...", ".a", "-", "x" * 128, "X" * 128]
    try:
        for scale, name in enumerate(names, 1):
            assert put(api, name, WEIGHTS * scale).status_code == 201
        assert_problem(api.put("/v1/layers/%2e%2e?op=rms_norm"), 422, "invalid_parameter")
        for held in on_each(fleet.url, layers_of):
            assert [each["name"] for each in held] == sorted(names)
        for scale, name in enumerate(names, 1):
            for answer in on_each(fleet.url, lambda client, name=name: keyed(client, name)):
                assert_right(answer, WEIGHTS * scale)
    finally:
        for name in names:
            api.delete(f"/v1/layers/{name}")


def keyed(client, name: str) -> httpx.Response:
    client.headers.update(KEY)
    return normalised(client, name)


def test_a_client_cannot_reach_a_process_by_its_own_socket(api):
    """Their folder is for this user alone, and no path of it stands in any answer."""
    text = api.get("/v1/info").text + str(processes(api)) + api.get("/metrics").text
    assert ".sock" not in text
    assert "/tmp" not in text
