"""Requests of the Open Inference Protocol without a key, with another one, and by other paths."""

import pytest
import torch

from tests.integration.harness.raw import Answer, exchange, head
from tests.integration.harness.wire import SAFETENSORS, packed
from tests.security.keys import EXPIRED, INFER, LAYERS, METRICS, bearing, write_keys
from tests.security.oip.requests import PATH, assert_refused, body


@pytest.fixture(scope="module")
def locked(launched, tmp_path_factory):
    keys = write_keys(tmp_path_factory.mktemp("keys"))
    return launched("--api-keys-file", str(keys), "--allowed-hosts", "server,v2")


def posted(server, target: str, key: str | None, *lines: str) -> Answer:
    content, length = body()
    lines = (*lines, *(f"{name}: {value}" for name, value in bearing(key).items()))
    said = (f"Inference-Header-Content-Length: {length}", f"Content-Length: {len(content)}", "Connection: close")
    return exchange(server.address, head(target, *lines, *said) + content)


@pytest.mark.parametrize("key", [None, "a-guess", EXPIRED])
def test_inference_asks_for_a_key(locked, key):
    assert_refused(posted(locked, PATH, key), 401)


@pytest.mark.parametrize("key", [LAYERS, METRICS])
def test_a_key_that_lacks_the_scope(locked, key):
    answer = posted(locked, PATH, key)
    assert_refused(answer, 403)
    assert "needs the scope infer" in answer.json()["error"]


@pytest.mark.parametrize("change", ["load", "unload"])
def test_the_repository_is_changed_with_the_scope_of_layers_alone(locked, change):
    path = f"/v2/repository/models/layer_norm/{change}"
    for key in (INFER, METRICS):
        assert_refused(posted(locked, path, key), 403)
    assert posted(locked, path, LAYERS).status_code not in (401, 403)


# Request targets that some server somewhere takes for the one that the key guards.
SECOND_PATHS = [
    "//v2/models/layer_norm/infer",
    "/v2//models/layer_norm/infer",
    "/v2/models/layer_norm/infer/",
    "/v2/./models/layer_norm/infer",
    "/v2/health/../models/layer_norm/infer",
    "/v2/health/live/../../models/layer_norm/infer",
    "/v2/health/live;/../../models/layer_norm/infer",
    "/V2/models/layer_norm/infer",
    "/v2%2fmodels/layer_norm/infer",
    "/%76%32/models/layer_norm/infer",
    "/v2/models/layer%5fnorm/infer",
    "/v2/models/layer_norm/versions/1/infer",
    "/v2/models/layer_norm/infer?key=1",
    "/v2/models/layer_norm/infer#/v2/health/live",
    "?/v2/models/layer_norm/infer",
    "http://server/v2/models/layer_norm/infer",
    "http://v2/models/layer_norm/infer",
    "/v2/models/layer_norm%2finfer",
    "/v2/health/live/infer",
    "/v2/models/layer_norm/generate",
    "/v2/models/layer_norm/generate_stream",
    "/v2/logging",
    "/v2/trace/setting",
    "/v2/models/layer_norm/trace/setting",
]


@pytest.mark.parametrize("target", SECOND_PATHS)
@pytest.mark.parametrize("key", [None, METRICS])
def test_no_second_path_leads_around_the_key(locked, target, key):
    answer = posted(locked, target, key)
    assert answer.status_code in (400, 401, 403, 404, 421), answer.text
    if key is None:
        assert answer.status_code in (400, 401, 421)


SPOOFED = [
    ("X-Original-URL: /v2/health/live",),
    ("X-Rewrite-URL: /v2/health/live",),
    ("X-Forwarded-Prefix: /v2/health/live",),
    ("X-HTTP-Method-Override: GET",),
    ("Authorization-Info: infer-key",),
    ("triton-grpc-protocol: infer-key=infer-key",),
]


@pytest.mark.parametrize("lines", SPOOFED, ids=lambda each: each[0][:24])
def test_no_header_leads_around_the_key(locked, lines):
    assert_refused(posted(locked, PATH, None, *lines), 401)


def test_probes_are_open_and_nothing_beside_them(locked):
    with locked.client() as api:
        assert api.get("/v2/health/live").status_code == api.get("/v2/health/ready").status_code == 200
        for path in ("/v2", "/v2/models/layer_norm", "/v2/models/stats", "/v2/health", "/v2/health/other"):
            assert_refused(api.get(path), 401)


def test_unloading_a_layer_is_in_the_audit_trail(locked, until):
    content = packed(weight=torch.ones(4))
    headers = bearing(LAYERS) | {"content-type": SAFETENSORS}
    with locked.client() as api:
        assert (
            api.put("/v1/layers/gone", params={"op": "rms_norm"}, content=content, headers=headers).status_code
            == 201
        )
        assert api.post("/v2/repository/models/gone/unload", headers=bearing(LAYERS)).status_code == 200
        assert api.get("/v2/models/gone", headers=bearing(LAYERS)).status_code == 404

    def told() -> list[str]:
        return [
            line for line in locked.lines if "layer_change" in line and "/v2/repository/models/gone/unload" in line
        ]

    until(told)
    assert "removed" in told()[0]
