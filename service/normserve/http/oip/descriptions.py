"""Inputs and outputs of a model, for the protocol's metadata and Triton's model configuration."""

from typing import Any

from normserve.codec.tensor_names import OF_SAMPLES, STATISTICS, is_parameter
from normserve.http.oip.asked import input_names, output_names
from normserve.http.oip.datatypes import NAMES
from normserve.http.oip.models import VERSION, Model
from normserve.jobs.job import Layer, Op, Pass
from normserve.memory.host_tensors import DType

PLATFORM = "normserve"
_ANY = -1


def metadata(model: Model, layer: Layer | None) -> dict[str, Any]:
    """The model metadata.  An arbitrary size is -1; x may also have any other rank.

    Args: layer: the registered layer, if the model is one.
    """
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [_described(model, layer, name) for name in input_names(model)],
        "outputs": [_described(model, layer, name) for name in output_names(model)],
    }


def configuration(model: Model, layer: Layer | None) -> dict[str, Any]:
    """The model configuration, as far as it applies to this server."""
    required = ("x", "dy")

    def tensor(name: str) -> dict[str, Any]:
        told = _described(model, layer, name)
        return {"name": name, "data_type": f"TYPE_{told['datatype']}", "dims": told["shape"]}

    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": 0,
        "input": [tensor(name) | {"optional": name not in required} for name in input_names(model)],
        "output": [tensor(name) for name in output_names(model)],
    }


def _described(model: Model, layer: Layer | None, name: str) -> dict[str, Any]:
    """One tensor.  The server accepts other types as well; this is the most usual one."""
    dtype = DType.FLOAT32
    if layer is not None and model.direction is Pass.FORWARD and name not in STATISTICS:
        dtype = layer.dtype
    return {"name": name, "datatype": NAMES[dtype], "shape": _shape(model, layer, name)}


def _shape(model: Model, layer: Layer | None, name: str) -> list[int]:
    size = _ANY if layer is None else layer.size
    row = [size] if layer is None else list(layer.row)
    name = name[1:] if name in ("dweight", "dbias", "dscale", "dshift") else name
    of_groups = model.op is Op.GROUP_NORM
    if is_parameter(name):
        return row
    if name in OF_SAMPLES:
        return [_ANY, size]
    if name in STATISTICS:
        return [_ANY, _ANY if layer is None else layer.spec.num_groups] if of_groups else [_ANY, *row[:-1]]
    return [_ANY, size, _ANY] if of_groups else [_ANY, *row]
