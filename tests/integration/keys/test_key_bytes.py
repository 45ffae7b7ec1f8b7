"""What one API key may have inside at once is its own, and leaves the others alone."""

import pytest

from tests.integration.harness.raw import Connection, head
from tests.integration.harness.wire import X, assert_problem, npy
from tests.security.keys import bearing, table, write_keys

KEYS = (
    table("small", "small-key", '["infer"]', "max_inflight_bytes = 100_000\n")
    + table("other", "other-key", '["infer"]')
    + table("scraper", "scraper-key", '["metrics"]')
)


@pytest.fixture(scope="module")
def locked(launched, tmp_path_factory):
    return launched("--api-keys-file", str(write_keys(tmp_path_factory.mktemp("keys"), KEYS)))


def test_a_key_that_has_its_bytes_inside_is_told_to_come_back(locked, until):
    slow = head("/v1/layer_norm", "Authorization: Bearer small-key", "Content-Length: 90000")
    with Connection(locked.address) as connection, locked.client() as http:
        connection.sendall(slow + b"x" * 10)
        until(lambda: "normserve_inflight_bytes 90000" in scrape(http))
        refused = http.post("/v1/layer_norm", content=b"x" * 50_000, headers=bearing("small-key"))
        assert_problem(refused, 429, "overloaded")
        assert "this key's max_inflight_bytes, 100000" in refused.json()["detail"]
        assert http.post("/v1/layer_norm", content=npy(X), headers=bearing("other-key")).status_code == 200


def test_a_body_that_a_key_may_never_send_is_413(locked):
    with locked.client() as http:
        refused = http.post("/v1/layer_norm", content=b"x" * 200_000, headers=bearing("small-key"))
    assert_problem(refused, 413, "too_large")


def scrape(http) -> str:
    return http.get("/metrics", headers=bearing("scraper-key")).text
