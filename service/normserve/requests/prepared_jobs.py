"""Validation of jobs, done once for jobs whose tensors have equal names, dtypes and shapes."""

from collections.abc import Mapping

from normserve.jobs.job import NormJob, NormSpec, RegisteredLayer
from normserve.jobs.memory_cost import MemoryCost
from normserve.jobs.validation import make_validated_job
from normserve.memory.tensors import HostTensor
from normserve.requests.prepared_calls import PreparedCallCache

# Bounds of a kept check's memory: in all, for each tensor, and for each axis.
_CHECK_BYTES, _TENSOR_BYTES, _AXIS_BYTES = 2**10, 2**8, 2**6


def prepare_job(
    prepared: PreparedCallCache,
    tenant: str,
    spec: NormSpec,
    tensors: Mapping[str, HostTensor],
    layer: RegisteredLayer | None,
    *,
    may_overwrite: bool = False,
) -> tuple[NormJob, MemoryCost]:
    """Make a job as `make_validated_job` does; skip checks that equal names, dtypes and shapes have passed before.

    Args:
        prepared: the cache of passed checks.
        tenant: the sender of the request.

    Raises:
        InvalidRequestError: as `make_validated_job`.
    """
    key = tenant, spec, *[(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    checked: tuple[NormSpec, MemoryCost] | None = prepared.find(key, layer)
    if checked is not None:
        return NormJob(checked[0], dict(tensors), layer, may_overwrite), checked[1]
    job, cost = make_validated_job(spec, tensors, layer, may_overwrite=may_overwrite)
    axes = sum([len(tensor.shape) for tensor in tensors.values()])
    nbytes = _CHECK_BYTES + _TENSOR_BYTES * len(tensors) + _AXIS_BYTES * axes
    prepared.store(key, (job.spec, cost), nbytes, tenant, layer)
    return job, cost
