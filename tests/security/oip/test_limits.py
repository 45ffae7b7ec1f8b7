"""Regions of shared memory: how many, how large and whose."""

import pytest

from tests.integration.harness.wire import assert_alive
from tests.security.keys import EVERYTHING, INFER, LAYERS, METRICS, bearing, write_keys
from tests.security.oip.regions import MIB, PREFIX, assert_refused, in_region, infer, register


def test_regions_without_end_are_told_to_come_back(http, sharing, made):
    made()
    statuses = [register(http, f"r{number}", byte_size=1).status_code for number in range(1100)]
    assert statuses == [200] * 1024 + [429] * 76
    assert http.post("/v2/systemsharedmemory/region/r5/unregister").status_code == 200
    assert register(http, "again", byte_size=1).status_code == 200
    assert http.post("/v2/systemsharedmemory/unregister").status_code == 200
    with made("large").open("r+b") as file:
        file.truncate(2**40)
    refused = register(http, key=PREFIX + "large", byte_size=64 * MIB + 1)
    assert_refused(refused, "more bytes do not fit", 429)
    assert int(refused.headers["retry-after"]) >= 1


def test_regions_count_as_bodies_do(launched, made):
    server = launched(
        "--oip-shared-memory", PREFIX, "--max-inflight-bytes", str(4 * MIB), "--max-body-bytes", "2000000"
    )
    with made().open("r+b") as file:
        file.truncate(16 * MIB)
    with server.client() as http:
        register(http, byte_size=16 * MIB)
        for nbytes in (2 * MIB, 16 * MIB):
            assert_refused(infer_sparse(http, nbytes), "a body must be at most 2000000 bytes", 413)
        assert infer_sparse(http, MIB).status_code == 200
        assert_alive(http)


def infer_sparse(http, nbytes):
    x = {"name": "x", "datatype": "FP32", "shape": [nbytes // 4096, 1024], "parameters": in_region(nbytes)}
    y = {"name": "y", "parameters": in_region(nbytes)}
    return http.post("/v2/models/layer_norm/infer", json={"inputs": [x], "outputs": [y]})


@pytest.fixture(scope="module")
def keyed(launched, tmp_path_factory):
    keys = write_keys(tmp_path_factory.mktemp("keys"))
    server = launched("--oip-shared-memory", PREFIX, "--api-keys-file", str(keys))
    with server.client() as client:
        yield client


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("wrong", 401), (LAYERS, 403), (METRICS, 403)])
@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_no_way_to_shared_memory_goes_past_the_key(keyed, kind, key, status):
    root = f"/v2/{kind}sharedmemory"
    for method, path in (
        ("POST", "/region/r/register"),
        ("POST", "/region/r/unregister"),
        ("POST", "/unregister"),
        ("GET", "/region/r/status"),
        ("GET", "/status"),
    ):
        for each in (root + path, (root + path).replace("shared", "%73hared")):
            assert keyed.request(method, each, headers=bearing(key)).status_code == status, each


def test_regions_of_one_key_are_nothing_to_another(keyed, row):
    ours, theirs = bearing(INFER), bearing(EVERYTHING)
    assert register(keyed, headers=ours).status_code == 200
    assert keyed.get("/v2/systemsharedmemory/status", headers=theirs).json() == []
    assert_refused(infer(keyed, in_region(), headers=theirs), "no region with the name 'r'")
    assert_refused(infer(keyed, None, in_region(), headers=theirs), "no region with the name 'r'")
    for path in ("region/r/unregister", "unregister"):
        assert keyed.post(f"/v2/systemsharedmemory/{path}", headers=theirs).status_code == 200
    assert infer(keyed, in_region(), in_region(), headers=ours).status_code == 200
