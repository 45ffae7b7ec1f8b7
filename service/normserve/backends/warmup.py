"""What a backend runs before the first request, so that no request pays for what is done once."""

from collections.abc import Iterator
from itertools import product
from math import prod

from normserve.jobs import Batch, NormJob, NormSpec, Op, Pass
from normserve.tensors import DType, HostTensor

_ROWS, _CHANNELS, _GROUPS = 8, 1024, 32


def warm_up_batches() -> Iterator[Batch]:
    """One small batch for each operation, direction and dtype, with parameters in float32."""
    for op, direction, dtype in product(Op, Pass, DType):
        x = _zeros(dtype, _ROWS, _CHANNELS)
        tensors = {"x": x, "weight": _zeros(DType.FLOAT32, _CHANNELS)}
        if op is not Op.RMS_NORM:
            tensors["bias"] = tensors["weight"]
        if direction is Pass.BACKWARD:
            tensors["dy"] = x
        spec = NormSpec(op, direction, eps=1e-5, num_groups=_GROUPS if op is Op.GROUP_NORM else 0)
        yield Batch((NormJob(spec, tensors),))


def _zeros(dtype: DType, *shape: int) -> HostTensor:
    return HostTensor(dtype, shape, memoryview(bytearray(prod(shape) * dtype.itemsize)))
