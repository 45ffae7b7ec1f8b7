"""What NVIDIA's perf_analyzer sends and reads over HTTP, byte for byte as its C++ client writes it."""

import json

from tests.integration.oip.models import random

COMPUTED = ("success", "queue", "compute_input", "compute_infer", "compute_output")
DURATIONS = (*COMPUTED, "fail", "cache_hit", "cache_miss")


def infer(api, model: str, inputs: dict[str, bytes], shapes: dict[str, list[int]], outputs: list[str], number: int):
    """One request: an id, every input binary, every output of the metadata asked for as binary."""
    header = {
        "id": str(number),
        "inputs": [
            {"name": name, "shape": shapes[name], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
            for name, data in inputs.items()
        ],
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}
    response = api.post(f"/v2/models/{model}/infer", content=text + b"".join(inputs.values()), headers=headers)
    assert response.status_code == 200, response.text
    told = json.loads(response.content[: int(response.headers["inference-header-content-length"])])
    assert told["id"] == str(number)
    return told


def statistics(api, model: str) -> dict[str, object]:
    (told,) = api.get(f"/v2/models/{model}/stats").json()["model_stats"]
    for duration in DURATIONS:
        assert {type(value) for value in told["inference_stats"][duration].values()} == {int}
        assert told["inference_stats"][duration].keys() == {"count", "ns"}
    return told


def test_a_measurement_from_the_metadata_to_the_statistics(api):
    """`perf_analyzer -m layer_norm --shape x:16,64 …`, with data for x alone and with data for every input."""
    assert "statistics" in api.get("/v2").json()["extensions"]
    metadata = api.get("/v2/models/layer_norm").json()
    config = api.get("/v2/models/layer_norm/config").json()
    assert config["max_batch_size"] == 0
    assert not config.keys() & {"sequence_batching", "model_transaction_policy", "response_cache"}
    assert {each["name"] for each in metadata["inputs"]} == {each["name"] for each in config["input"]}
    shapes = {"x": [16, 64], "residual": [16, 64], "weight": [64], "bias": [64]}
    every = {name: random(*shape).tobytes() for name, shape in shapes.items()}
    outputs = [each["name"] for each in metadata["outputs"]]

    before = statistics(api, "layer_norm")
    told = infer(api, "layer_norm", {"x": every["x"]}, shapes, outputs, 1)
    assert [each["name"] for each in told["outputs"]] == ["y", "mean", "rstd"]
    told = infer(api, "layer_norm", every, shapes, outputs, 2)
    assert [each["name"] for each in told["outputs"]] == outputs
    after = statistics(api, "layer_norm")

    assert after["inference_count"] - before["inference_count"] == 2
    assert after["execution_count"] - before["execution_count"] == 2
    assert after["last_inference"] > 1e12
    spent = {}
    for duration in COMPUTED:
        then, now = before["inference_stats"][duration], after["inference_stats"][duration]
        assert now["count"] - then["count"] == 2
        spent[duration] = now["ns"] - then["ns"]
    assert spent["compute_infer"] > 0
    assert sum(spent.values()) - spent["success"] <= spent["success"]


def test_failures_are_counted_apart(api):
    before = statistics(api, "rms_norm")
    assert api.post("/v2/models/rms_norm/infer", content=b"{").status_code == 400
    after = statistics(api, "rms_norm")
    assert after["inference_stats"]["fail"]["count"] == before["inference_stats"]["fail"]["count"] + 1
    assert after["inference_count"] == before["inference_count"]


def test_statistics_of_all_models_are_those_of_each(api):
    told = {each["name"]: each for each in api.get("/v2/models/stats").json()["model_stats"]}
    assert told["rms_norm"] == statistics(api, "rms_norm")
    assert told["rms_norm"]["version"] == "1"
