"""Several processes behind one port count together."""

import json

import httpx

from tests.integration.oip.models import random

X = random(2, 8)


def test_statistics_are_of_all_processes(start_server):
    server = start_server("--devices", "cpu,cpu")
    x = {"name": "x", "shape": [2, 8], "datatype": "FP32", "parameters": {"binary_data_size": 64}}
    text = json.dumps({"inputs": [x]}).encode()
    headers = {"inference-header-content-length": str(len(text))}
    clients = [httpx.Client(base_url=server.url) for _ in range(6)]
    try:
        for client in clients:
            sent = client.post("/v2/models/layer_norm/infer", content=text + X.tobytes(), headers=headers)
            assert sent.status_code == 200
        told = [client.get("/v2/models/layer_norm/stats").json()["model_stats"][0] for client in clients]
    finally:
        for client in clients:
            client.close()
    assert {each["inference_count"] for each in told} == {6}
    with server.client() as api:
        lines = api.get("/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("normserve_requests_total") and 'op="layer_norm"' in line]
    assert len(counted) == 2
    assert all('transport="oip",code="200"' in line for line in counted)
