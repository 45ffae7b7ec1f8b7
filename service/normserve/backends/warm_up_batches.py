"""The calls that a backend runs before the first request, so that no request pays for one-time work."""

import math
from collections.abc import Collection, Iterator
from itertools import product
from math import prod

from normserve.jobs.job import LAYER_OPS, Batch, NormJob, NormSpec, Op, PassDirection
from normserve.memory.tensors import FLOATS, DType, HostTensor

_ROWS = 8
_MOST_GROUPS = 32


def make_warm_up_batches(sizes: Collection[int]) -> Iterator[Batch]:
    """Yield small batches of zeros: two for each length, operation, direction and dtype.  One has float32
    parameters, the other has no parameters.

    In the order of need: forward before backward, and with parameters before without.  Chains are left
    out: they have any number of norms, each number with its own kernels, which are compiled at the
    first request.
    """
    for size, has_parameters, direction, dtype, op in product(
        sizes, (True, False), PassDirection, FLOATS, LAYER_OPS
    ):
        tensors = {"x": _make_zeros(dtype, _ROWS, size)}
        x = tensors["x"]
        if has_parameters:
            tensors["weight"] = _make_zeros(DType.FLOAT32, size)
        if has_parameters and op is not Op.RMS_NORM:
            tensors["bias"] = tensors["weight"]
        if direction is PassDirection.BACKWARD:
            tensors["dy"] = x
        groups = math.gcd(size, _MOST_GROUPS) if op is Op.GROUP_NORM else 0
        spec = NormSpec(op, direction, eps=1e-5, num_groups=groups)
        yield Batch((NormJob(spec, tensors),))


def _make_zeros(dtype: DType, *shape: int) -> HostTensor:
    return HostTensor(dtype, shape, memoryview(bytearray(prod(shape) * dtype.itemsize)))
