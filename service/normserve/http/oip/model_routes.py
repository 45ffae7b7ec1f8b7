"""Inputs and outputs of a model, for the protocol's metadata and Triton's model configuration."""

from typing import Any

from normserve.codec.tensor_names import OF_SAMPLES, STATISTICS, is_parameter
from normserve.http.oip.asked import list_input_names, list_output_names
from normserve.http.oip.datatypes import NAMES
from normserve.http.oip.models import VERSION, InferenceModel
from normserve.jobs.job import Op, PassDirection, RegisteredLayer
from normserve.memory.tensors import DType

PLATFORM = "normserve"
_ANY = -1


def describe_model(model: InferenceModel, layer: RegisteredLayer | None) -> dict[str, Any]:
    """Make the metadata of a model.  An arbitrary size is -1; x may also have any other rank.

    Args: layer: the registered layer, if the model is one.
    """
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [_describe_tensor(model, layer, name) for name in list_input_names(model)],
        "outputs": [_describe_tensor(model, layer, name) for name in list_output_names(model)],
    }


def describe_configuration(model: InferenceModel, layer: RegisteredLayer | None) -> dict[str, Any]:
    """Make the configuration of a model, as far as it applies to this server."""
    required = ("x", "dy")

    def describe_tensor(name: str) -> dict[str, Any]:
        description = _describe_tensor(model, layer, name)
        return {"name": name, "data_type": f"TYPE_{description['datatype']}", "dims": description["shape"]}

    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": 0,
        "input": [describe_tensor(name) | {"optional": name not in required} for name in list_input_names(model)],
        "output": [describe_tensor(name) for name in list_output_names(model)],
    }


def _describe_tensor(model: InferenceModel, layer: RegisteredLayer | None, name: str) -> dict[str, Any]:
    """Describe one tensor.  The server accepts other types as well; this is the most usual one."""
    dtype = DType.FLOAT32
    if layer is not None and model.direction is PassDirection.FORWARD and name not in STATISTICS:
        dtype = layer.dtype
    return {"name": name, "datatype": NAMES[dtype], "shape": _describe_shape(model, layer, name)}


def _describe_shape(model: InferenceModel, layer: RegisteredLayer | None, name: str) -> list[int]:
    size = _ANY if layer is None else layer.size
    row = [size] if layer is None else list(layer.parameter_shape)
    name = name[1:] if name in ("dweight", "dbias", "dscale", "dshift") else name
    of_groups = model.op is Op.GROUP_NORM
    if is_parameter(name):
        return row
    if name in OF_SAMPLES:
        return [_ANY, size]
    if name in STATISTICS:
        return [_ANY, _ANY if layer is None else layer.spec.num_groups] if of_groups else [_ANY, *row[:-1]]
    return [_ANY, size, _ANY] if of_groups else [_ANY, *row]
