"""Requests that ask for more memory than they bring: refused before it is taken, or computed within the grant."""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integration.harness.raw import exchange, head
from tests.integration.harness.wire import NPY, SAFETENSORS, assert_alive, assert_problem, npy, packed, unpacked

MIB = 2**20
# What a server of these tests grants: bodies, results and temporaries.
GRANTED = 16 * MIB
# What beside them may come and go: pieces of one batch, and what malloc keeps.
CONSTANT = 64 * MIB
ALL = {"out_dtype": "float32", "stats": "true", "dropout": "0.1", "seed": "3"}


@pytest.fixture(scope="module")
def small(launched):
    """A server that grants little memory."""
    server = launched(
        "--max-inflight-bytes", str(GRANTED), "--max-idle-slab-bytes", "0", "--max-layer-bytes", "4096"
    )
    with server.client() as client:
        assert_alive(client)
        yield server, client


@pytest.fixture
def growth(small):
    """Says by how much the server's peak exceeded what it had when the test began; nothing is left of it."""
    server, client = small
    process = Path("/proc", str(server.owner))
    if not (process / "clear_refs").exists():
        pytest.skip("only Linux tells the peak since a moment")

    def resident(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", (process / "status").read_text())
        assert found is not None
        return 1024 * int(found[1])

    (process / "clear_refs").write_text("5")
    before = resident("VmRSS")
    yield lambda: resident("VmHWM") - before
    assert_alive(client)
    assert "normserve_inflight_bytes 0.0" in client.get("/metrics").text


def send(client, content: bytes, path: str = "/v1/layer_norm", kind: str = NPY, **params: str):
    return client.post(path, content=content, params=params, headers={"content-type": kind})


def header_of(shape: object, nbytes: int = 0, dtype: str = "F32") -> bytes:
    text = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    return struct.pack("<Q", len(text)) + text


class TestOversizedPayload:
    def test_announced_body_that_never_fits_is_refused_unread(self, small, growth):
        server, _ = small
        answer = exchange(server.address, head("/v1/layer_norm", f"Content-Length: {2**40}", "Connection: close"))
        assert_problem(answer, 413, "too_large")
        assert growth() < MIB * 8

    def test_results_that_never_fit_are_refused_before_the_work(self, small, growth):
        _, client = small
        # 2 MiB of rows of one element ask for 12 MiB of results; twice as many for more than there is.
        answer = send(client, packed(x=torch.ones(2 * MIB, 1).half()), kind=SAFETENSORS, **ALL)
        assert_problem(answer, 413, "too_large")
        asked = int(re.search(r"takes (\d+) bytes", answer.json()["detail"])[1])
        assert asked == pytest.approx(28 * MIB, abs=1024)
        assert f"at most {GRANTED}" in answer.json()["detail"]
        assert growth() < 16 * MIB

    def test_temporaries_that_never_fit_are_refused_before_the_work(self, small, growth):
        _, client = small
        # One row of 2 Mi elements, of which the CPU needs copies in float32.
        answer = send(client, npy(np.ones((1, 2 * MIB), np.float16)))
        assert_problem(answer, 413, "too_large")
        assert growth() < 16 * MIB

    def test_what_is_granted_stays_within_it(self, small, growth):
        _, client = small
        x = torch.randn(MIB, 1).half()
        answer = send(client, packed(x=x), kind=SAFETENSORS, **ALL)
        assert answer.status_code == 200, answer.text
        results = unpacked(answer.content)
        assert torch.equal(results["mean"], x[:, 0].float())
        assert growth() < GRANTED + CONSTANT

    def test_fortran_order_counts_with_its_copy(self, small):
        _, client = small
        x = np.ones((MIB // 2, 4), np.float32)
        assert send(client, npy(x)).status_code == 200
        assert_problem(send(client, npy(np.asfortranarray(np.ones((MIB // 2, 5), np.float32)))), 413, "too_large")


class TestSmallBodyOfTerabytes:
    @pytest.mark.parametrize("shape", [[2**40], [2**20, 2**20], [1, 2**41]])
    def test_safetensors(self, small, growth, shape):
        _, client = small
        assert_problem(send(client, header_of(shape), kind=SAFETENSORS), 400, "malformed_payload")
        assert growth() < 8 * MIB

    def test_npy(self, small, growth):
        _, client = small
        body = npy(np.ones((1, 10), np.float32))
        text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1099511627776), }"
        start = len(b"\x93NUMPY") + 4
        length = int.from_bytes(body[start - 2 : start], "little")
        body = body[:start] + text.ljust(length - 1) + b"\n" + body[start + length :]
        assert_problem(send(client, body), 400, "malformed_payload")
        assert growth() < 8 * MIB


class TestOverflowingSizes:
    @pytest.mark.parametrize(
        "shape", [[2**32, 2**30], [2**31, 2**31, 4], [2**62, 4], [2**63, 2], [2**64], [2**32, 2**32, 0, 2**40, 1]]
    )
    def test_products_that_wrap_to_little_or_nothing(self, small, growth, shape):
        """In 64 bits each of these has no bytes."""
        _, client = small
        answer = send(client, header_of(shape), kind=SAFETENSORS)
        assert answer.status_code in (400, 422) or (0 in shape and answer.status_code == 200), answer.text
        assert growth() < 8 * MIB

    @pytest.mark.parametrize("direction", ["", "/backward"])
    @pytest.mark.parametrize("shape", [[0, 2**40], [0, 2**62], [2**40, 0, 2**40, 3], [2**62, 2**62, 0, 7]])
    def test_no_rows_of_any_length(self, small, growth, shape, direction):
        _, client = small
        x = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        text = json.dumps({"x": x} | ({"dy": x} if direction else {})).encode()
        body = struct.pack("<Q", len(text)) + text
        answer = send(client, body, "/v1/layer_norm" + direction, SAFETENSORS)
        assert answer.status_code in (200, 400, 422), answer.text
        assert growth() < 8 * MIB

    @pytest.mark.parametrize("layout", ["nchw", "nhwc"])
    @pytest.mark.parametrize("shape", [[0, 4, 2**62], [0, 4, 2**40, 2**40], [0, 2**62, 2**62, 4]])
    def test_no_samples_of_any_size(self, small, growth, shape, layout):
        _, client = small
        query = {"num_groups": "4", "layout": layout, "stats": "true"}
        answer = send(client, header_of(shape), "/v1/group_norm", SAFETENSORS, **query)
        assert answer.status_code in (200, 400, 422), answer.text
        assert growth() < 8 * MIB


class TestLayers:
    def put(self, client, name: str, size: int):
        content = packed(weight=torch.ones(size))
        params = {"op": "rms_norm"}
        return client.put(
            f"/v1/layers/{name}", content=content, params=params, headers={"content-type": SAFETENSORS}
        )

    def test_bytes_are_bounded_and_told(self, small):
        _, client = small
        assert self.put(client, "a", 512).status_code == 201
        assert self.put(client, "b", 256).status_code == 201
        refused = self.put(client, "c", 257)
        assert_problem(refused, 413, "too_large")
        assert "1028 bytes beside 3072" in refused.json()["detail"]
        assert self.put(client, "b", 512).status_code == 200
        assert_problem(self.put(client, "b", 513), 413, "too_large")
        told = client.get("/metrics").text
        assert 'normserve_layer_bytes{kind="host"} 4096.0' in told
        assert "normserve_layers 2.0" in told
        assert client.get("/v1/layers/b").json()["size"] == 512
        for name in "ab":
            assert client.delete(f"/v1/layers/{name}").status_code == 204
        assert 'normserve_layer_bytes{kind="host"} 0.0' in client.get("/metrics").text

    def test_body_and_copy_that_never_fit(self, small, growth):
        _, client = small
        assert_problem(self.put(client, "a", 9 * MIB // 4), 413, "too_large")
        assert growth() < 24 * MIB


def test_results_of_others_leave_no_room_for_now(stage_of):
    """What is granted to one request counts until its last byte is out; the next is told to come back."""
    stage = stage_of("--max-inflight-bytes", str(GRANTED))
    occupied = stage.occupy_device()
    content, ask = npy(np.ones((MIB // 2, 1), np.float32)), {"out_dtype": "float16", "stats": "true"}

    def post():
        return stage.http.post("/v1/layer_norm", content=content, params=ask, headers={"accept": SAFETENSORS})

    waiting = stage.later(post)
    stage.wait_for_queue(1)
    # 2 MiB of body, 1 of y and 4 of statistics; once more is not too much, three times is.
    told = stage.http.get("/metrics").text
    inside = float(re.search(r"^normserve_inflight_bytes (\S+)$", told, re.MULTILINE)[1])
    assert inside == pytest.approx(7 * MIB, abs=64 * 1024)
    second = stage.later(post)
    stage.wait_for_queue(2)
    refused = post()
    assert_problem(refused, 429, "overloaded")
    assert "retry-after" in refused.headers
    stage.open_gate()
    assert all(running.result().status_code == 200 for running in (occupied, waiting, second))
    assert post().status_code == 200
