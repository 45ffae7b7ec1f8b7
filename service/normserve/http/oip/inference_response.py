"""The response to an inference request: its results, each in the JSON or as binary data after it."""

from collections.abc import Mapping, Sequence
from math import prod

import msgspec

from normserve.codec import json_tensors
from normserve.errors import UnexpectedTensorError
from normserve.http.oip.datatypes import NAMES
from normserve.http.oip.inference_request import LENGTH, InferenceRequest, RequestedOutput, list_output_names
from normserve.http.oip.models import VERSION, InferenceModel
from normserve.http.transport import Buffers, Headers
from normserve.jobs.job import NormJob
from normserve.jobs.result_specs import infer_result_specs
from normserve.memory.tensors import HostTensor
from normserve.requests.numbered_tensors import TensorSplit

_JSON, _BINARY = b"application/json", b"application/octet-stream"


def require_expressible(
    model: InferenceModel, request: InferenceRequest, job: NormJob, tensor_split: TensorSplit | None = None
) -> None:
    """Before the computation, refuse a request if its response cannot have the requested form.

    Args: tensor_split: how results are divided if x was sent as several tensors.

    Raises:
        UnexpectedTensorError: these inputs produce none of the requested outputs.
        TooLargeError: an output is requested as JSON and too long for it.
    """
    if request.outputs is None and request.is_binary_default:
        return
    given = {name: (tensor.dtype, tensor.shape) for name, tensor in job.tensors.items()}
    results = infer_result_specs(job.spec, given, job.layer)
    if tensor_split is not None:
        results = tensor_split.split_specs(results)
    wanted = _select_outputs(model, request, results)
    if not wanted:
        raise UnexpectedTensorError(f"these inputs give {', '.join(results)}, and nothing that is requested")
    for each in wanted:
        if not each.is_binary and each.region is None:
            json_tensors.require_json_size(each.name, prod(results[each.name][1]))


def build_response(
    model: InferenceModel, request: InferenceRequest, results: Mapping[str, HostTensor]
) -> tuple[Buffers, bytes, Headers]:
    """Build a response: the body in pieces, its media type, and the header with the length of the JSON.

    There is no such header if the complete body is JSON.

    Raises:
        NotAcceptableError: JSON cannot represent a value of a result.
    """
    described: list[dict[str, object]] = []
    buffers: list[bytes | memoryview] = []
    for each in _select_outputs(model, request, results):
        tensor = results[each.name]
        output: dict[str, object] = {"name": each.name, "datatype": NAMES[tensor.dtype], "shape": tensor.shape}
        if each.region is not None:
            output["parameters"] = {
                "shared_memory_region": each.region.name,
                "shared_memory_offset": each.region.offset,
                "shared_memory_byte_size": len(tensor.data),
            }
        elif each.is_binary:
            output["parameters"] = {"binary_data_size": len(tensor.data)}
            buffers.append(tensor.data)
        else:
            output["data"] = json_tensors.encode(each.name, tensor)
        described.append(output)
    document: dict[str, object] = {"model_name": model.name, "model_version": VERSION, "outputs": described}
    if request.id is not None:
        document["id"] = request.id
    text = msgspec.json.encode(document)
    if not buffers:
        return [text], _JSON, []
    return [text, *buffers], _BINARY, [(LENGTH, b"%d" % len(text))]


def _select_outputs(
    model: InferenceModel, request: InferenceRequest, results: Mapping[str, object]
) -> Sequence[RequestedOutput]:
    """List the requested outputs that the results contain; list all results if the request names none."""
    if request.outputs is not None:
        return [each for each in request.outputs if each.name in results]
    order = {name: place for place, name in enumerate(list_output_names(model))}
    # Outputs of several tensors stay in the order of their numbers.
    names = results if len(results) == 1 else sorted(results, key=lambda name: order[name.partition(".")[0]])
    return [RequestedOutput(name, request.is_binary_default) for name in names]
