"""CUDA shared memory: handles that lie, places that are none, and regions that go while they are used.

The device's memory is the host's here.
"""

import base64
import os
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from normserve.codec.gateway_header import GATEWAY_CALLER
from normserve.memory.device_segments import ShareableDevice

from tests.security.keys import EVERYTHING, INFER, bearing, write_keys
from tests.security.local.test_device_memory import ROOT, SCRIPT, X, normalised
from tests.service.memory.allocations import allocation_of
from tests.service.memory.fake_driver import FakeDriver, bytes_at

NBYTES = 2**21
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
OFF = "--oip-cuda-shared-memory"


class Owner:
    """A client of this host with allocations of its own."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.driver = FakeDriver()
        self.device = ShareableDevice(0, self.driver)

    def allocate(self, nbytes: int = NBYTES) -> tuple[int, bytes]:
        """An address and its handle."""
        address = self.driver.allocate(nbytes)
        return address, allocation_of(self.device, address).handle

    def register(self, handle: bytes, name="r", byte_size=NBYTES, device_id=0, **options) -> httpx.Response:
        raw = {"b64": base64.b64encode(handle).decode()}
        said = {"raw_handle": raw, "device_id": device_id, "byte_size": byte_size}
        return self.http.post(f"/v2/cudasharedmemory/region/{name}/register", json=said, **options)

    def made(self, name="r") -> int:
        """A registered region with X at its beginning: its address here."""
        address, handle = self.allocate()
        response = self.register(handle, name)
        assert response.status_code == 200, response.text
        self.view(address)[:24] = X.flatten()
        return address

    def view(self, address: int) -> np.ndarray:
        return np.frombuffer(bytes_at(address, NBYTES), np.float32)

    def result(self, address: int, offset=4096) -> np.ndarray:
        return self.view(address)[offset // 4 : offset // 4 + 24].reshape(2, 12)

    def unregister(self, path="unregister", **options) -> None:
        assert self.http.post(f"/v2/cudasharedmemory/{path}", **options).status_code == 200

    def close(self) -> None:
        for address in tuple(self.driver.allocations):
            self.driver.free(address)


def place(offset=0, nbytes=96, region="r") -> dict[str, object]:
    where = {"shared_memory_region": region, "shared_memory_byte_size": nbytes, "shared_memory_offset": offset}
    return {"parameters": where}


def infer(http, x=None, y=None, model="layer_norm", more=(), outputs=(), **options) -> httpx.Response:
    described = {"name": "x", "datatype": "FP32", "shape": [2, 12], **(x or place())}
    wanted = [{"name": "y", **(y or place(4096))}, *outputs]
    said = {"inputs": [described, *more], "outputs": wanted}
    return http.post(f"/v2/models/{model}/infer", json=said, **options)


def assert_refused(response, told: str, status: int = 400) -> None:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    assert told in response.json()["error"], response.text


@pytest.fixture(scope="module")
def uds(tmp_path_factory):
    return tmp_path_factory.mktemp("cuda") / "normserve.sock"


@pytest.fixture(scope="module")
def sharing(launched, uds):
    options = ("--oip-shared-memory-bytes", str(8 * NBYTES), "--uds", str(uds))
    return launched("--oip-cuda-shared-memory", *options, script=SCRIPT, env=ENVIRONMENT)


@pytest.fixture
def owner(sharing, until):
    with httpx.Client(base_url=sharing.url) as http:
        owner = Owner(http)
        yield owner
        owner.unregister()
        address = owner.made()
        assert infer(http).status_code == 200
        np.testing.assert_allclose(owner.result(address), normalised(X), atol=1e-5)
        owner.unregister()
        owner.close()
    until(lambda: opened_by(sharing) == 0)


def opened_by(server) -> int:
    """How many allocations of others the server has mapped."""
    maps = Path(f"/proc/{server.owner}/maps").read_text(encoding="utf-8")
    return maps.count("memfd:allocation")


def test_tensors_are_computed_where_they_lie(owner):
    address = owner.made()
    for factor in (1, -3):
        owner.view(address)[:24] = factor * X.flatten()
        response = infer(owner.http)
        assert response.status_code == 200, response.text
        (told,) = response.json()["outputs"]
        assert (told["name"], told["shape"]) == ("y", [2, 12])
        assert told["parameters"] == place(4096)["parameters"]
        np.testing.assert_allclose(owner.result(address), normalised(factor * X), atol=1e-5)
    lines = owner.http.get("/metrics").text.splitlines()
    assert any('op="layer_norm"' in line and 'transport="oip_cuda"' in line for line in lines)


def test_a_result_may_go_over_its_tensor_and_over_nothing_else(owner):
    address = owner.made()
    assert infer(owner.http, y=place(0)).status_code == 200
    np.testing.assert_allclose(owner.result(address, 0), normalised(X), atol=1e-5)
    for offset in (16, 80):
        assert_refused(infer(owner.http, y=place(offset)), "y would be written over x")
    weight = {"name": "weight", "datatype": "FP32", "shape": [12], **place(8192, 48)}
    assert_refused(infer(owner.http, y=place(8192), more=[weight]), "y would be written over weight")
    mean = {"name": "mean", **place(4096, 8)}
    assert_refused(infer(owner.http, outputs=[mean]), "over each other")


def test_the_same_handle_twice_is_two_names_of_the_same_memory(sharing, owner, until):
    address, handle = owner.allocate()
    assert owner.register(handle, "a").status_code == owner.register(handle, "b").status_code == 200
    assert opened_by(sharing) == 1
    assert_refused(owner.register(handle, "a"), "unregister it first")
    owner.view(address)[:24] = X.flatten()
    assert_refused(infer(owner.http, place(0, region="a"), place(48, region="b")), "would be written over x")
    owner.unregister("region/a/unregister")
    assert infer(owner.http, place(region="b"), place(4096, region="b")).status_code == 200
    np.testing.assert_allclose(owner.result(address), normalised(X), atol=1e-5)
    assert_refused(infer(owner.http, place(region="a"), place(4096, region="b")), "no region with the name 'a'")
    owner.unregister("region/b/unregister")
    until(lambda: opened_by(sharing) == 0)


@pytest.mark.parametrize("change", ["", "AAAA", "A" * 84, "A" * 88, "*" * 88, "é" * 44, "A" * 60_000])
def test_what_is_no_handle(owner, change):
    said = {"raw_handle": {"b64": change}, "device_id": 0, "byte_size": 1}
    response = owner.http.post("/v2/cudasharedmemory/region/r/register", json=said)
    assert_refused(response, "raw_handle must be")


def test_a_handle_of_nothing(owner):
    address, handle = owner.allocate()
    owner.driver.free(address)
    for forged in (bytes(64), b"\x01" + os.urandom(63), b"\xff" * 64, handle):
        response = owner.register(forged)
        assert_refused(response, "the handle must be of memory that the server can open")
    assert owner.http.get("/v2/cudasharedmemory/status").json() == []


@pytest.mark.parametrize("byte_size", [0, NBYTES + 1, 2**40, 2**63 - 1])
def test_a_false_extent(sharing, owner, byte_size, until):
    _, handle = owner.allocate()
    assert_refused(owner.register(handle, byte_size=byte_size), "bytes")
    until(lambda: opened_by(sharing) == 0)


@pytest.mark.parametrize("more", [{"byte_size": -1}, {"byte_size": 2**64}, {"byte_size": 1.5}, {"device_id": -1}])
def test_numbers_that_are_none(owner, more):
    _, handle = owner.allocate()
    assert owner.register(handle, **more).status_code == 400


def test_the_clients_number_of_the_device_is_told_and_not_believed(owner):
    _, handle = owner.allocate()
    assert owner.register(handle, device_id=7, byte_size=4096).status_code == 200
    told = [{"name": "r", "device_id": 7, "byte_size": 4096}]
    assert owner.http.get("/v2/cudasharedmemory/status").json() == told
    assert owner.http.get("/v2/cudasharedmemory/region/r/status").json() == told
    assert_refused(owner.http.get("/v2/cudasharedmemory/region/x/status"), "no region")
    assert owner.http.get("/v2/systemsharedmemory/status").json() == []
    assert_refused(owner.http.get("/v2/systemsharedmemory/region/r/status"), "no region")
    assert owner.http.post("/v2/systemsharedmemory/unregister").status_code == 200
    assert owner.http.post("/v2/systemsharedmemory/region/r/unregister").status_code == 200
    assert owner.http.get("/v2/cudasharedmemory/status").json() == told
    assert_refused(infer(owner.http, y=place(4096)), "do not lie within the 4096 bytes")


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(NBYTES, 96), (NBYTES - 80, 96), (2**63 - 16, 96), (8, 96), (1, 96), (4096, 95), (4096, NBYTES), (-16, 96)],
)
def test_places_that_the_region_does_not_have(owner, offset, nbytes):
    address = owner.made()
    responses = [infer(owner.http, y=place(offset, nbytes))]
    if nbytes == 96:
        responses.append(infer(owner.http, x=place(offset)))
    assert [each.status_code for each in responses] == [400] * len(responses)
    assert not owner.view(address)[24:].any()


def test_tensors_of_one_request_are_all_on_the_device_or_none(owner):
    owner.made()
    in_body = {"data": X.flatten().tolist()}
    weight = {"name": "weight", "datatype": "FP32", "shape": [12], "data": [1.0] * 12}
    told = "must all be in regions of CUDA memory or none of them"
    assert_refused(infer(owner.http, x=in_body), told)
    assert_refused(infer(owner.http, y={"parameters": {"binary_data": True}}), told)
    assert_refused(infer(owner.http, more=[weight]), told)
    x = {"name": "x", "datatype": "FP32", "shape": [2, 12], **place()}
    assert_refused(owner.http.post("/v2/models/layer_norm/infer", json={"inputs": [x]}), told)
    dy = {"name": "dy", "datatype": "FP32", "shape": [2, 12], **place(96)}
    weight |= place(192, 48)
    del weight["data"]
    dx = [{"name": "dx", **place(4096)}]
    said = {"inputs": [x, dy, weight], "outputs": dx}
    response = owner.http.post("/v2/models/layer_norm_backward/infer", json=said)
    assert_refused(response, "dweight has none")
    assert infer(owner.http).status_code == 200


def test_regions_that_come_and_go_while_they_are_used(sharing, owner, until):
    """What a request has found stays mapped until it is computed."""
    address, handle = owner.allocate()
    owner.view(address)[:24] = X.flatten()
    ended = threading.Event()

    def change() -> None:
        with httpx.Client(base_url=sharing.url) as http:
            other = Owner(http)
            while not ended.is_set():
                other.register(handle)
                other.unregister()

    changing = threading.Thread(target=change)
    changing.start()
    try:
        statuses = [infer(owner.http).status_code for _ in range(300)]
    finally:
        ended.set()
        changing.join()
    assert {*statuses} <= {200, 400}
    assert 200 in statuses
    np.testing.assert_allclose(owner.result(address), normalised(X), atol=1e-5)
    until(lambda: opened_by(sharing) == 0)


def test_bytes_of_both_kinds_are_capped_together(sharing, owner, until):
    _, handle = owner.allocate()
    assert [owner.register(handle, f"r{number}").status_code for number in range(9)] == [200] * 8 + [429]
    refused = owner.register(handle, "r9")
    assert_refused(refused, "more bytes do not fit", 429)
    assert int(refused.headers["retry-after"]) >= 1
    told = [
        line for line in owner.http.get("/metrics").text.splitlines() if line.startswith("normserve_oip_region")
    ]
    assert {line.split()[0]: float(line.split()[1]) for line in told} == {
        "normserve_oip_regions": 8,
        "normserve_oip_region_bytes": 8 * NBYTES,
    }
    owner.unregister("region/r3/unregister")
    assert owner.register(handle, "r9").status_code == 200
    owner.unregister()
    until(lambda: opened_by(sharing) == 0)


def test_clients_of_the_unix_socket_may(sharing, owner, uds):
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://localhost") as http:
        other = Owner(http)
        address = other.made()
        assert infer(http).status_code == 200
        np.testing.assert_allclose(other.result(address), normalised(X), atol=1e-5)
        other.unregister()
        other.close()


def test_callers_of_the_gateway_may_where_they_are_on_this_host(sharing, owner, uds):
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://localhost") as http:
        other = Owner(http)
        other.made()
        _, handle = other.allocate()
        for address in ("10.1.2.3", "2001:db8::1", "::ffff:10.1.2.3", "", "unheard of"):
            caller = {GATEWAY_CALLER.decode(): address}
            assert_refused(other.register(handle, "far", headers=caller), "over loopback", 403)
            assert_refused(infer(http, headers=caller), "over loopback", 403)
        for number, address in enumerate(("127.0.0.1", "::1", "::ffff:127.0.0.1")):
            caller = {GATEWAY_CALLER.decode(): address}
            assert other.register(handle, f"near-{number}", headers=caller).status_code == 200
            assert infer(http, headers=caller).status_code == 200
        other.unregister()
        other.close()


def test_advertised_where_it_works(owner, server):
    assert "cuda_shared_memory" in owner.http.get("/v2").json()["extensions"]
    with server.client() as http:
        assert "cuda_shared_memory" not in http.get("/v2").json()["extensions"]
        assert_refused(Owner(http).register(bytes(64)), OFF)


def test_a_server_without_a_device(launched):
    with launched("--oip-cuda-shared-memory").client() as http:
        assert "cuda_shared_memory" not in http.get("/v2").json()["extensions"]
        assert_refused(Owner(http).register(bytes(64)), "no device whose memory")


def test_regions_of_one_key_are_nothing_to_another(launched, tmp_path):
    keys = ("--api-keys-file", str(write_keys(tmp_path)))
    server = launched("--oip-cuda-shared-memory", *keys, script=SCRIPT, env=ENVIRONMENT)
    ours, theirs = bearing(INFER), bearing(EVERYTHING)
    with server.client() as http:
        owner = Owner(http)
        _, handle = owner.allocate()
        assert owner.register(handle, headers=ours).status_code == 200
        assert http.get("/v2/cudasharedmemory/status", headers=theirs).json() == []
        assert_refused(infer(http, headers=theirs), "no region with the name 'r'")
        owner.unregister(headers=theirs)
        assert infer(http, headers=ours).status_code == 200
        owner.close()
