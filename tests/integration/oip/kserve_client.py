"""What KServe's own client makes of a server, as JSON; run by an interpreter that has the package `kserve`.

Arguments: the server's URL.
"""

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)


def request(name: str, *, binary: bool, dtype: str = "FP32", **options: object) -> InferRequest:
    """One with x, whose tensors are in the JSON or behind it."""
    x = InferInput("x", [*X.shape], dtype)
    x.set_data_from_numpy(X.astype({"FP32": np.float32, "FP16": np.float16}[dtype]), binary_data=binary)
    return InferRequest(name, [x], request_id="7", **options)


async def ask(url: str) -> dict[str, object]:
    """The answers, by what was asked."""
    told: dict[str, object] = {}
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    try:
        told["live"] = await client.is_server_live(url)
        told["ready"] = await client.is_server_ready(url)
        told["model"] = await client.is_model_ready(url, "layer_norm")
        for key, options in {
            "json": {"binary": False},
            "binary": {"binary": True, "request_outputs": [RequestedOutput("y", {"binary_data": True})]},
            "half": {"binary": True, "dtype": "FP16", "parameters": {"binary_data_output": True}},
        }.items():
            answer = await client.infer(url, request("layer_norm", **options), model_name="layer_norm")
            (output,) = answer.outputs
            array = output.as_numpy().astype(np.float64)
            told[key] = [answer.id, answer.model_name, output.name, output.datatype, array.tolist()]
        for key, model in (("unknown", "nobody"), ("wrong", "layer_norm_backward")):
            try:
                await client.infer(url, request(model, binary=False), model_name=model)
            except Exception as error:
                told[key] = str(error)
    finally:
        await client.close()
    return told


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask(sys.argv[1]))))
