"""Names of layers that a path or a file system could take for something else.

Layers are the only things that a client names, and a name never becomes a path: there is no request that has the
server open a file, or register memory, by a name.
"""

import pytest
import torch

from tests.integration.harness.raw import exchange
from tests.integration.harness.wire import SAFETENSORS, X, assert_alive, assert_problem, npy, packed

BODY = packed(weight=torch.ones(12))


def put(server, path: str):
    line = f"PUT {path}?op=rms_norm HTTP/1.1"
    lines = (line, "Host: localhost", f"Content-Type: {SAFETENSORS}", "Connection: close")
    return exchange(server.address, "\r\n".join((*lines, f"Content-Length: {len(BODY)}", "", "")).encode() + BODY)


def names(api) -> set[str]:
    return {each["name"] for each in api.get("/v1/layers").json()["layers"]}


@pytest.mark.parametrize("name", [".", "..", "%2e", "%2E%2e", ".%2e", "%2e."])
def test_dots_are_no_names(server, api, name):
    refused = put(server, f"/v1/layers/{name}")
    assert_problem(refused, 422, "invalid_parameter")
    assert names(api) == set()
    assert_problem(api.post(f"/v1/rms_norm?layer={name}", content=npy(X)), 422, "invalid_parameter")


@pytest.mark.parametrize(
    "name",
    [
        "../../../etc/cron.d/x",
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e%2f%2e%2e%2fx",
        "..%5c..%5cx",
        "%252e%252e%252fx",
        "....//x",
        "/etc/passwd",
        "a%2Fb",
        "a%00",
        "a%00.layer",
        "a%0a",
        "a%0ab",
        "",
        "~root",
        "C:x",
        "file:x",
        "a%20",
        "%c0%ae%c0%ae",
        "a;b",
        "x" * 129,
    ],
)
def test_paths_are_no_names(server, api, name):
    assert_problem(put(server, f"/v1/layers/{name}"), 422, "invalid_parameter")
    assert_problem(api.post(f"/v1/rms_norm?layer={name}", content=npy(X)), 422, "invalid_parameter")
    assert names(api) == set()
    assert_alive(api)


@pytest.mark.parametrize("name", ["...", ".a", "a.", "-", "..a", "a..b", ".layer", "staged", "lock", "nul"])
def test_odd_names_are_names(server, api, name):
    assert put(server, f"/v1/layers/{name}").status_code == 201
    assert names(api) == {name}
    assert api.post(f"/v1/rms_norm?layer={name}", content=npy(X)).status_code == 200
    assert api.delete(f"/v1/layers/{name}").status_code == 204
    assert names(api) == set()
