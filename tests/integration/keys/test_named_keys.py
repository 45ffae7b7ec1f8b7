"""A file of API keys on a running server: who may do what, how often, and what is told of it."""

import json
import re

import httpx
import pytest

from tests.integration.fleet.test_fleet import WEIGHT, normalised, on_each, put
from tests.integration.harness.wire import NPY, SAFETENSORS, X, assert_alive, assert_problem, npy, packed
from tests.security.keys import (
    EVERYTHING,
    EXPIRED,
    INFER,
    KEYS,
    LAYERS,
    METRICS,
    SLOW,
    bearing,
    table,
    write_keys,
)

SECRETS = (INFER, LAYERS, METRICS, EXPIRED, SLOW, EVERYTHING)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def locked(launched, path):
    return launched("--api-keys-file", str(path), "--access-log")


def client(server, key: str | None) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers=bearing(key), timeout=60, verify=False)


def lines(server, *words: str) -> list[str]:
    return [line for line in server.lines if all(word in line for word in words)]


def test_each_key_does_what_it_may(locked):
    with client(locked, INFER) as http:
        assert_alive(http)
        assert_problem(put(http, "a"), 403, "forbidden")
    with client(locked, LAYERS) as http:
        assert put(http, "a").status_code == 201
        assert http.get("/v1/layers/a").status_code == 200
        assert_problem(normalised(http, "a"), 403, "forbidden")
    with client(locked, INFER) as http:
        assert normalised(http, "a").status_code == 200
        assert http.get("/v1/layers").json()["layers"][0]["name"] == "a"


def test_a_rate_is_told_with_when_to_come_back(locked):
    with client(locked, SLOW) as http:
        assert_alive(http)
        refused = http.post("/v1/layer_norm", content=npy(X))
    assert_problem(refused, 429, "rate_limited")
    assert "0.001 requests a second" in refused.json()["detail"]
    assert 900 < int(refused.headers["retry-after"]) <= 1000


def scraped(server) -> str:
    with client(server, METRICS) as http:
        return http.get("/metrics").text


def count(server, name: str, labels: str) -> float:
    found = re.search(rf"^{name}{{{labels}}} (\S+)$", scraped(server), re.M)
    return 0.0 if found is None else float(found[1])


def test_metrics_count_by_the_name_of_the_key(locked, until):
    requests = 'key="reader",code="200"'
    before = count(locked, "normserve_key_requests_total", requests)
    received = count(locked, "normserve_key_bytes_total", 'key="reader",direction="in"')
    sent = count(locked, "normserve_key_bytes_total", 'key="reader",direction="out"')
    with client(locked, INFER) as http:
        answer = http.post("/v1/layer_norm", content=npy(X))
    until(lambda: count(locked, "normserve_key_requests_total", requests) == before + 1)
    assert count(locked, "normserve_key_bytes_total", 'key="reader",direction="in"') == received + len(npy(X))
    assert count(locked, "normserve_key_bytes_total", 'key="reader",direction="out"') == sent + len(answer.content)


def test_strangers_add_no_series(locked):
    names = {"reader", "admin", "prometheus", "old", "slow", "root"}
    with client(locked, None) as http:
        # Few enough that others of this second are told of.
        for guess in range(3):
            assert http.get("/v1/info", headers=bearing(f"guess-{guess}")).status_code == 401
    text = scraped(locked)
    assert set(re.findall(r'^normserve_key_requests_total{key="([^"]*)"', text, re.M)) <= names
    assert "guess" not in text


def test_an_expired_key_is_counted_and_told_of(locked, until):
    with client(locked, EXPIRED) as http:
        assert_problem(http.get("/v1/info"), 401, "unauthorized")
    # A front end refuses by itself, and tells the process that counts.
    until(lambda: count(locked, "normserve_key_requests_total", 'key="old",code="401"') >= 1)
    until(lambda: lines(locked, "normserve.audit: key_refused", "reason=expired", "key=old", "address=127.0.0.1"))


def test_a_change_of_a_layer_is_audited_whatever_became_of_it(locked, until):
    with client(locked, LAYERS) as http:
        http.headers["x-request-id"] = "changing-b"
        assert put(http, "b").status_code == 201
        assert put(http, "b").status_code == 200
        assert http.put("/v1/layers/b?op=rms_norm", content=b"nonsense").status_code >= 400
        assert http.delete("/v1/layers/b").status_code == 204
        assert http.delete("/v1/layers/b").status_code == 404
    until(lambda: len(lines(locked, "normserve.audit: layer_change", "changing-b")) == 5)
    found = lines(locked, "normserve.audit: layer_change", "changing-b")
    results = [re.search(r"method=(\S+) path=/v1/layers/b result=(\S+) key=admin", line).groups() for line in found]
    assert results == [
        ("PUT", "registered"),
        ("PUT", "replaced"),
        ("PUT", "unsupported_media_type"),
        ("DELETE", "removed"),
        ("DELETE", "unknown_layer"),
    ]


def test_a_refused_path_forges_no_line(locked, until):
    forged = "/v1/%0a2026-01-01%2000:00:00,000%20INFO%20normserve.audit:%20start%1b%5b31m"
    with client(locked, "a-guess") as http:
        assert http.get(forged, headers={"x-request-id": "forger"}).status_code == 401
    until(lambda: lines(locked, "key_refused", "request_id=forger"))
    (line,) = lines(locked, "key_refused", "request_id=forger")
    assert r"/v1/\n2026" in line
    assert not [line for line in locked.lines if line.startswith("2026-01-01")]
    assert "\x1b" not in locked.log


def test_the_access_log_has_a_line_for_each_request(locked, until):
    with client(locked, INFER) as http:
        http.headers["x-request-id"] = "seen"
        body = npy(X)
        answer = http.post("/v1/layer_norm", content=body, headers={"content-type": NPY})
        http.get("/v1/layers/a-name-of-the-clients")
        http.get("/v1/nope")
    until(lambda: len(lines(locked, "normserve.access", "request_id=seen")) == 3)
    first, second, third = lines(locked, "normserve.access", "request_id=seen")
    assert (
        f"method=POST path=/v1/layer_norm status=200 key=reader address=127.0.0.1 received_bytes={len(body)}"
        in first
    )
    assert f"sent_bytes={len(answer.content)} ms=" in first
    assert "path=/v1/layers/{name} status=404" in second
    assert "path=(unmatched)" in third.replace('"', "")
    assert "a-name-of-the-clients" not in second


def test_no_key_is_ever_written_down(locked):
    with client(locked, INFER) as http:
        http.get("/v1/info")
    text = locked.log + scraped(locked)
    assert not [key for key in SECRETS if key in text]


def test_the_start_is_audited_without_secrets(locked):
    (line,) = lines(locked, "normserve.audit: start ", "version=")
    assert "api_keys_file" in line


def test_the_page_is_there_for_everybody_and_its_figures_are_not(locked):
    with client(locked, None) as http:
        page = http.get("/")
        assert page.status_code == 200
        assert 'id="key-form" class="key" hidden' in page.text
        assert page.text.count("Bearer $NORMSERVE_API_KEY") == 4
        assert_problem(http.get("/metrics"), 401, "unauthorized")


def test_the_file_is_read_again(start_server, tmp_path, until):
    path = write_keys(tmp_path)
    locked = start_server("--api-keys-file", str(path), "--access-log")
    with client(locked, "new-key") as new, client(locked, INFER) as old:
        path.write_text(table("newcomer", "new-key", '["infer"]'))
        until(lambda: new.get("/v1/info").status_code == 200)
        assert_problem(old.get("/v1/info"), 401, "unauthorized")
        until(lambda: lines(locked, "normserve.audit: keys_loaded", "count=1", "newcomer"))
        path.write_text("[[keys]]\nname = 'half")
        until(lambda: lines(locked, "ERROR", "the old keys stay in use"))
        assert new.get("/v1/info").status_code == 200
        path.write_text(KEYS)
        until(lambda: old.get("/v1/info").status_code == 200)
        assert new.get("/v1/info").status_code == 401
    until(lambda: 'key="newcomer",code="200"' in scraped(locked))


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("[[keys]]", (), "keys[0].name: Field required"),
        (None, (), "No such file or directory"),
        (KEYS, ("--api-key", "another"), "must not be given together"),
    ],
)
def test_a_server_without_its_keys_does_not_start(start_server, tmp_path, content, options, said):
    path = tmp_path / "keys.toml"
    if content is not None:
        path.write_text(content)
    server = start_server("--api-keys-file", str(path), *options, wait=False)
    assert server.wait(60) == 2
    assert said in server.log
    assert "another" not in server.log


FLEET = ("--log-format", "json", "--access-log", "--devices", "cpu,cpu")


@pytest.fixture(scope="module")
def fleet(launched, tmp_path_factory):
    path = write_keys(tmp_path_factory.mktemp("fleet"))
    return launched("--api-keys-file", str(path), *FLEET), path


def events(server) -> list[dict]:
    return [json.loads(line) for line in list(server.lines)]


def test_a_key_changes_layers_in_the_whole_fleet(fleet, until):
    server, _ = fleet
    (registered,) = on_each(server.url, lambda api: put(authorised(api, LAYERS), "shared"), 1)
    assert registered.status_code == 201
    answers = on_each(server.url, lambda api: normalised(authorised(api, INFER), "shared"), 4)
    assert {answer.status_code for answer in answers} == {200}
    until(lambda: [each for each in events(server) if each["message"] == "layer_change"])
    # The change is told of once, by the process that the client reached.
    (change,) = [each for each in events(server) if each["message"] == "layer_change"]
    assert (change["key"], change["result"], change["path"]) == ("admin", "registered", "/v1/layers/shared")


def authorised(api: httpx.Client, key: str) -> httpx.Client:
    api.headers.update(bearing(key))
    return api


def test_a_fleet_is_scraped_and_described_as_a_whole(fleet):
    server, _ = fleet
    for text in on_each(server.url, lambda api: authorised(api, METRICS).get("/metrics").text):
        assert set(re.findall(r'^normserve_process_up{process="(\d)"} 1', text, re.M)) == {"0", "1"}
    for told in on_each(server.url, lambda api: authorised(api, INFER).get("/v1/info").json()["processes"]):
        assert all("pid" in each for each in told)


def test_every_process_reads_the_file_again(fleet, until):
    server, path = fleet
    path.write_text(KEYS + table("newcomer", "new-key", '["layers"]'))

    def statuses() -> list[int]:
        return on_each(server.url, lambda api: authorised(api, "new-key").get("/v1/layers").status_code)

    until(lambda: statuses() == [200, 200])

    def loaded() -> list[tuple[str, int]]:
        found = [each for each in events(server) if each["message"] == "keys_loaded"]
        return sorted((each["process"], each["count"]) for each in found)

    # A process answers by new keys a moment before it logs them.
    until(lambda: len(loaded()) >= 4)
    assert loaded() == [("0", 6), ("0", 7), ("1", 6), ("1", 7)]


def test_everything_that_a_fleet_logs_is_json(fleet, until):
    server, _ = fleet
    asked = {"x-request-id": "of-the-fleet", "content-type": SAFETENSORS}
    for status in on_each(
        server.url,
        lambda api: (
            authorised(api, INFER).post("/v1/rms_norm", content=packed(x=WEIGHT), headers=asked).status_code
        ),
    ):
        assert status == 200
    until(lambda: len([each for each in events(server) if each.get("request_id") == "of-the-fleet"]) == 2)
    found = [each for each in events(server) if each.get("request_id") == "of-the-fleet"]
    assert {each["process"] for each in found} == {"0", "1"}
    assert {(each["logger"], each["key"], each["status"]) for each in found} == {
        ("normserve.access", "reader", 200)
    }
    assert all(isinstance(each["ms"], float) and each["ms"] > 0 for each in found)
    starts = [each for each in events(server) if each["message"] == "start"]
    assert sorted(each["process"] for each in starts) == ["0", "1"]
    assert all({"time", "level", "logger", "message"} <= each.keys() for each in events(server))


def test_the_end_is_audited(start_server, tmp_path):
    server = start_server("--api-keys-file", str(write_keys(tmp_path)), *FLEET)
    server.terminate()
    assert server.wait() == 0
    for event in ("drain", "end"):
        assert sorted(each["process"] for each in events(server) if each["message"] == event) == ["0", "1"]
