"""What an inference request gets back: which results, and each of them in the JSON or behind it."""

from collections.abc import Mapping
from math import prod

import msgspec

from normserve.codec import json_tensors
from normserve.errors import UnexpectedTensorError
from normserve.http.oip.asked import Asked, Output
from normserve.http.oip.datatypes import NAMES
from normserve.http.oip.header import LENGTH
from normserve.http.oip.models import VERSION, Model
from normserve.http.transport import Buffers, Headers
from normserve.jobs.job import NormJob
from normserve.jobs.results import results_of
from normserve.memory.host_tensors import HostTensor

_JSON, _BINARY = b"application/json", b"application/octet-stream"


def require_possible(asked: Asked, job: NormJob) -> None:
    """Say before the work, not after it, that an answer cannot be given as it is wanted.

    Raises:
        UnexpectedTensorError: an output is wanted that these inputs do not give.
        TooLargeError: one is wanted as JSON and too long for it.
    """
    if asked.outputs is None and asked.all_binary:
        return
    given = {name: (tensor.dtype, tensor.shape) for name, tensor in job.tensors.items()}
    results = results_of(job.spec, given, job.layer)
    for each in asked.outputs or _all_of(results, is_binary=False):
        if each.name not in results:
            raise UnexpectedTensorError(f"these inputs give {', '.join(results)}, and no {each.name}")
        if not each.is_binary and each.region is None:
            json_tensors.require_few(each.name, prod(results[each.name][1]))


def answer(model: Model, asked: Asked, results: Mapping[str, HostTensor]) -> tuple[Buffers, bytes, Headers]:
    """A response's body in pieces, its media type, and the header that says where the JSON ends.

    Raises:
        NotAcceptableError: JSON cannot say what a result holds.
    """
    described: list[dict[str, object]] = []
    buffers: list[bytes | memoryview] = []
    for each in asked.outputs or _all_of(results, is_binary=asked.all_binary):
        tensor = results[each.name]
        output: dict[str, object] = {"name": each.name, "datatype": NAMES[tensor.dtype], "shape": tensor.shape}
        if each.is_binary:
            output["parameters"] = {"binary_data_size": len(tensor.data)}
            buffers.append(tensor.data)
        else:
            output["data"] = json_tensors.encode(each.name, tensor)
        described.append(output)
    said: dict[str, object] = {"model_name": model.name, "model_version": VERSION, "outputs": described}
    if asked.id is not None:
        said["id"] = asked.id
    text = msgspec.json.encode(said)
    if not buffers:
        return [text], _JSON, []
    return [text, *buffers], _BINARY, [(LENGTH, b"%d" % len(text))]


def _all_of(results: Mapping[str, object], *, is_binary: bool) -> list[Output]:
    return [Output(name, is_binary) for name in results]
