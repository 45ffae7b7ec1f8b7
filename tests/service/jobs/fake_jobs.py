"""Jobs made from next to nothing."""

from math import prod

from normserve.jobs.job import LAYER_OPTIONS, NormJob, NormSpec, Op, PassDirection, RegisteredLayer
from normserve.memory.tensors import DType, HostTensor


def tensor(*shape: int, dtype: DType = DType.FLOAT32) -> HostTensor:
    return HostTensor(dtype, shape, memoryview(bytearray(prod(shape) * dtype.itemsize)))


def job(*shape: int, layer: RegisteredLayer | None = None, tensors: dict | None = None, **spec: object) -> NormJob:
    """A forward LayerNorm of x of that shape, unless told otherwise."""
    asked = {"op": Op.LAYER_NORM, "direction": PassDirection.FORWARD, "eps": 1e-5} | spec
    return NormJob(NormSpec(**asked), {"x": tensor(*shape)} | (tensors or {}), layer)


_LAYER_SPEC = ("op", *[option.name for option in LAYER_OPTIONS])


def layer(name: str = "a", size: int = 4, **changes: object) -> RegisteredLayer:
    options = {option: changes.pop(option) for option in _LAYER_SPEC if option in changes}
    described = {
        "name": name,
        "spec": NormSpec(**{"op": Op.LAYER_NORM, "direction": PassDirection.FORWARD, "eps": 1e-5} | options),
        "size": size,
        "dtype": DType.FLOAT32,
        "has_bias": True,
        "nbytes": 8 * size,
        "backend_parameters": None,
    }
    return RegisteredLayer(**described | changes)
