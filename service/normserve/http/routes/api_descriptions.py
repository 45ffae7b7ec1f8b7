"""The OpenAPI description of a request's tensors, and examples of requests and responses.

Examples are listed by method and path template.  Tests send the requests to a server and compare its responses
with the examples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normserve import __version__
from normserve.codec.api_names import CHAIN_PARAMETERS
from normserve.codec.media_types import NPY, SAFETENSORS
from normserve.http.curl import make_sample_command
from normserve.jobs.job import NormSpec, Op, PassDirection, RegisteredLayer
from normserve.jobs.validation import list_accepted_tensor_names
from normserve.memory.tensors import FLOATS, DType
from normserve.metrics.exposition import CONTENT_TYPE
from normserve.requests.layer_requests import describe_layer

_DOCS = {
    "x": "the tensor to normalise, `[..., N]`, or `[B, C, *spatial]` with layout=nchw",
    "weight": "optional, `[N]`, or `[H, N]` for x `[..., H, N]`, or `[C]` with layout=nchw: multiplies what is "
    "normalised",
    "bias": "optional, as weight: is added after it",
    "scale": "optional, each sample's own: the shape of any leading axes of x and its last, as `[B, N]` for x "
    "`[B, tokens, N]`, or `[B, C]` with layout=nchw; `1 + scale` multiplies after weight and bias",
    "shift": "optional, as scale: is added after it",
    "gate": "optional, shaped as scale, needs residual: `residual + gate * x` is normalised",
    "residual": "optional, in x's shape: `x + residual` is normalised, and forward returns it as residual_out",
    "dy": "required, as x: the gradient of y",
    "mean": "optional, float32, together with rstd: what forward returned with stats",
    "rstd": "optional, float32: what forward returned with stats",
    "dresidual_out": "optional, in x's shape: a gradient that reached residual_out from elsewhere, added to dx",
}
_DOCS_OF_GROUPS = {
    "x": "the tensor to normalise, `[B, C, *spatial]`, or `[B, *spatial, C]` with layout=nhwc",
    "weight": "optional, `[C]`: multiplies what is normalised",
    "bias": "optional, `[C]`: is added after weight",
    "scale": "optional, `[B, C]` in either layout: each sample's own; `1 + scale` multiplies after weight and bias",
    "shift": "optional, `[B, C]` in either layout: each sample's own; is added after scale",
}


def describe_tensors(op: Op, direction: PassDirection) -> str:
    """Describe the tensors that a body of one operation may contain, as Markdown."""
    docs = _DOCS | _DOCS_OF_GROUPS if op is Op.GROUP_NORM else _DOCS
    docs |= {name: f"optional, `[N]`, of norm {name[-1]} of the chain" for name in CHAIN_PARAMETERS}
    lines = [f"- `{name}`: {docs[name]}" for name in list_accepted_tensor_names(op, direction)]
    or_npy = ", or npy of x alone" if direction is PassDirection.FORWARD else ""
    return "\n".join([f"Safetensors of these by their names{or_npy}:", "", *lines])


_JSON, _TEXT = "application/json", "text/plain"

EXAMPLE_PARAMETERS: Mapping[str, str | int] = {
    "name": "encoder.LayerNorm",
    "version": "1",
    "region": "input",
    "num_groups": 2,
}
"""Values in examples for the parameters of paths and queries, by name."""


@dataclass(frozen=True, slots=True)
class RouteExample:
    """An example of a request to a route and of its response, for the OpenAPI description.

    Attributes:
        response_body: the response with status 200, or 201 for a new resource; None: it has no body.
            Bytes are not shown.
        media_type: of the response.
        request_body: the request's JSON; None if it has none.
    """

    response_body: Any = None
    media_type: str = _JSON
    request_body: Any = None


_LAYER = describe_layer(
    RegisteredLayer(
        name=str(EXAMPLE_PARAMETERS["name"]),
        spec=NormSpec(Op.LAYER_NORM, PassDirection.FORWARD, eps=1e-5),
        size=768,
        dtype=DType.FLOAT32,
        has_bias=True,
        nbytes=2 * 768 * DType.FLOAT32.itemsize,
        backend_parameters=None,
    )
)
_INFO = {
    "version": __version__,
    "state": "ready",
    "backend": "triton",
    "device": {"name": "NVIDIA H100 80GB HBM3", "kind": "cuda"},
    "copy_bandwidth_bytes_per_second": 2.9e12,
    "versions": {"python": "3.11.7", "torch": "2.11.0", "triton": "3.6.0"},
    "limits": {
        "max_body_bytes": 2**30,
        "max_inflight_requests": 256,
        "max_inflight_bytes": 2**32,
        "max_layers": 10000,
        "max_layer_bytes": 2**28,
        "timeout_ms": 30000.0,
        "max_batch_requests": 64,
        "max_batch_bytes": 2**22,
    },
    "layers": 1,
    "operations": [op.value for op in Op],
    "dtypes": [dtype.value for dtype in FLOATS],
    "media_types": [SAFETENSORS, NPY],
    "local": None,
}
_OF_STATUS = {
    "GET /livez": RouteExample("ok\n", _TEXT),
    "GET /readyz": RouteExample("ready\n", _TEXT),
    "GET /metrics": RouteExample("normserve_inflight_requests 0.0\n", CONTENT_TYPE),
    "GET /v1/info": RouteExample(_INFO),
    "GET /sample.npy": RouteExample(b"", NPY),
}
_OF_LAYERS = {
    "GET /v1/layers": RouteExample({"layers": [_LAYER]}),
    "GET /v1/layers/{name}": RouteExample(_LAYER),
    "PUT /v1/layers/{name}": RouteExample(_LAYER),
    "DELETE /v1/layers/{name}": RouteExample(),
}

_X = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
_Y = [-1.3416354656219482, -0.4472118318080902, 0.4472118318080902, 1.3416354656219482]
_INFER = RouteExample(
    {
        "model_name": "encoder.LayerNorm",
        "model_version": "1",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 4], "data": _Y + _Y}],
    },
    request_body={"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": _X}]},
)
_MODEL = {
    "name": "encoder.LayerNorm",
    "versions": ["1"],
    "platform": "normserve",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 768]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 768]}],
}
_CONFIGURATION = {
    "name": "encoder.LayerNorm",
    "platform": "normserve",
    "backend": "normserve",
    "max_batch_size": 0,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 768], "optional": False}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1, 768]}],
}
_TIMED = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
_STATISTICS = {
    "model_stats": [
        {
            "name": "encoder.LayerNorm",
            "version": "1",
            "last_inference": 1735689600000,
            "inference_count": 1,
            "execution_count": 1,
            "inference_stats": {name: {"count": 1, "ns": 42954} for name in _TIMED},
            "batch_stats": [],
        }
    ]
}
_SYSTEM_REGION = {"key": "/normserve_input", "offset": 0, "byte_size": 4096}
_CUDA_REGION = {"device_id": 0, "byte_size": 4096}
_HANDLE = {"b64": "of the 64 bytes of a CUDA IPC handle"}
_EXTENSIONS = ["binary_tensor_data", "statistics", "model_repository", "model_configuration", "parameters"]
_OF_INFERENCE_PROTOCOL = {
    "GET /v2": RouteExample({"name": "normserve", "version": __version__, "extensions": _EXTENSIONS}),
    "GET /v2/health/live": RouteExample({"live": True}),
    "GET /v2/health/ready": RouteExample({"ready": True}),
    "POST /v2/models/{name}/infer": _INFER,
    "GET /v2/models/{name}": RouteExample(_MODEL),
    "GET /v2/models/{name}/ready": RouteExample({"name": "encoder.LayerNorm", "ready": True}),
    "GET /v2/models/{name}/config": RouteExample(_CONFIGURATION),
    "GET /v2/models/{name}/stats": RouteExample(_STATISTICS),
    "GET /v2/models/stats": RouteExample(_STATISTICS),
    "POST /v2/repository/index": RouteExample(
        [{"name": "encoder.LayerNorm", "version": "1", "state": "READY", "reason": ""}],
        request_body={"ready": True},
    ),
    "POST /v2/repository/models/{name}/load": RouteExample({}, request_body={}),
    "POST /v2/repository/models/{name}/unload": RouteExample({}, request_body={}),
}
_OF_REGIONS = {
    f"{method} /v2/{kind}sharedmemory{region}/{what}": example
    for kind, description, registration in (
        ("system", _SYSTEM_REGION, _SYSTEM_REGION),
        ("cuda", _CUDA_REGION, {"raw_handle": _HANDLE, **_CUDA_REGION}),
    )
    for method, region, what, example in (
        ("POST", "/region/{region}", "register", RouteExample(request_body=registration)),
        *(
            ("GET", region, "status", RouteExample([{"name": "input", **description}]))
            for region in ("", "/region/{region}")
        ),
        *(("POST", region, "unregister", RouteExample()) for region in ("", "/region/{region}")),
    )
}
_EXAMPLES: Mapping[str, RouteExample] = {**_OF_STATUS, **_OF_LAYERS, **_OF_INFERENCE_PROTOCOL, **_OF_REGIONS}


def find_example(method: str, path: str) -> RouteExample | None:
    """Return the example of a route, in any version of a model; None for operations, whose bodies are not JSON."""
    return _EXAMPLES.get(f"{method} {path.replace('/versions/{version}', '')}")


def make_command_line(op: Op, direction: PassDirection) -> str:
    """Make an example command for an operation, with curl if the sample array is sufficient, else in Python."""
    if op is Op.LAYER_NORM_CHAIN:
        return "normserve.client.Client(URL).layer_norm_chain(x, [weight, weight])"
    if direction is PassDirection.FORWARD:
        query = f"?num_groups={EXAMPLE_PARAMETERS['num_groups']}" if op is Op.GROUP_NORM else ""
        return make_sample_command("$URL", f"/v1/{op.value}{query}")
    groups = f"num_groups={EXAMPLE_PARAMETERS['num_groups']}, " if op is Op.GROUP_NORM else ""
    return f"normserve.client.Client(URL).{op.value}_backward(dy, x, {groups}weight=weight)"
