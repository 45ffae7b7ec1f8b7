"""While a checkpoint loads: layers that are not there yet are not unknown, and clients wait for them."""

import socket
import threading
import time

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from normserve.client import Client, RetryPolicy, UnavailableError, UnknownLayerError

from tests.integration.harness.stage import SCRIPT
from tests.integration.harness.wire import assert_problem, npy

X = np.arange(8, dtype=np.float32).reshape(2, 4)
LOADED, AWAITED, NOWHERE = "a.norm", "b.norm", "c.norm"
INFER = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": X.ravel().tolist()}]}


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {
        f"{name}.{of}": torch.full((4,), value)
        for name in (LOADED, AWAITED)
        for of, value in {"weight": 2.0, "bias": 1.0}.items()
    }
    safetensors.torch.save_file(tensors, path)
    return path


@pytest.fixture(params=[(), ("--frontends", "1")], ids=["one process", "front end"])
def loading(request, start_server, checkpoint, tmp_path, until):
    """A server on a Unix socket and one of shared memory, which loads until the gate opens; and the gate."""
    gate, http, local = (tmp_path / name for name in ("gate", "http.sock", "local.sock"))
    options = ("--checkpoint", str(checkpoint), "--uds", str(http), "--local", str(local), *request.param)
    environment = {"GATE": str(gate), "WAIT_AT_LOAD": "1"}
    start_server(*options, env=environment, script=SCRIPT, wait=False)
    until(lambda: listens(http))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(http)), base_url="http://localhost", timeout=60) as api:
        until(lambda: holds_first(api))
        yield api, http, local, gate
        gate.touch()


def listens(path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


def holds_first(api: httpx.Client) -> bool:
    return api.get(f"/v1/layers/{LOADED}").status_code == 200


def statuses(api: httpx.Client, name: str) -> list[int]:
    answers = [
        api.post("/v1/layer_norm", params={"layer": name}, content=npy(X)),
        api.get(f"/v1/layers/{name}"),
        api.delete(f"/v1/layers/{name}"),
        api.get(f"/v2/models/{name}"),
        api.post(f"/v2/models/{name}/infer", json=INFER),
        api.post(f"/v2/repository/models/{name}/load"),
    ]
    return with_retry_after(answers)


def list_statuses(api: httpx.Client) -> list[int]:
    """Of the lists of layers."""
    return with_retry_after([api.get("/v1/layers"), api.head("/v1/layers"), api.post("/v2/repository/index")])


def with_retry_after(answers: list[httpx.Response]) -> list[int]:
    for answer in answers:
        assert ("retry-after" in answer.headers) == (answer.status_code == 503)
    return [answer.status_code for answer in answers]


def test_layers_that_may_still_come_are_not_unknown(loading, until):
    api, http, local, gate = loading
    impatient = RetryPolicy(tries=1)
    assert list_statuses(api) == [503] * 3
    assert_problem(api.get("/v1/layers"), 503, "not_ready")
    for name in (AWAITED, NOWHERE):
        assert statuses(api, name) == [503] * 6
        assert_problem(api.get(f"/v1/layers/{name}"), 503, "not_ready")
        assert api.get(f"/v2/models/{name}/ready").status_code == 400
        for url in (f"http+unix://{http}", f"unix://{local}"):
            with Client(url, retries=impatient) as client:
                for ask in (
                    lambda of=client, by=name: of.layer_norm(X, layer=by),
                    lambda of=client, by=name: of.layer(by),
                    lambda of=client: of.layers(),
                ):
                    with pytest.raises(UnavailableError) as caught:
                        ask()
                    assert (caught.value.code, caught.value.retry_after_s) == ("not_ready", 1)
    gate.touch()
    until(lambda: api.get("/readyz").status_code == 200)
    assert statuses(api, NOWHERE) == [404] * 6
    assert list_statuses(api) == [200] * 3
    assert [each["name"] for each in api.get("/v1/layers").json()["layers"]] == [LOADED, AWAITED]
    assert api.get(f"/v2/models/{NOWHERE}/ready").status_code == 404
    with Client(f"unix://{local}") as client, pytest.raises(UnknownLayerError):
        client.layer_norm(X, layer=NOWHERE)


def test_clients_wait_for_a_layer(loading):
    _, http, local, gate = loading
    # Not one attempt more than the first counts.
    patient = RetryPolicy(tries=2)
    expected = 2 * torch.nn.functional.layer_norm(torch.from_numpy(X), (4,)).numpy() + 1

    def open_gate() -> None:
        time.sleep(1.5)
        gate.touch()

    opening = threading.Thread(target=open_gate)
    opening.start()
    for url in (f"unix://{local}", f"http+unix://{http}"):
        with Client(url, retries=patient) as client:
            np.testing.assert_allclose(client.layer_norm(X, layer=AWAITED).y, expected, rtol=1e-4)
    opening.join()
