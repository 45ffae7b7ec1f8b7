"""Jobs whose tensors are alike are checked once."""

from collections.abc import Mapping

from normserve.jobs.job import Layer, NormJob, NormSpec
from normserve.jobs.memory_cost import MemoryCost
from normserve.jobs.validation import costed_job
from normserve.memory.host_tensors import HostTensor
from normserve.requests.prepared_calls import PreparedCalls

# A check that is kept takes less than this, for each tensor, and for each axis of it.
_CHECK_BYTES, _TENSOR_BYTES, _AXIS_BYTES = 2**10, 2**8, 2**6


def prepare_job(
    prepared: PreparedCalls,
    tenant: str,
    spec: NormSpec,
    tensors: Mapping[str, HostTensor],
    layer: Layer | None,
    *,
    may_overwrite: bool = False,
) -> tuple[NormJob, MemoryCost]:
    """Do as `costed_job`, without its checks where tensors of these names, types and shapes passed them before.

    Args:
        prepared: keeps the checks.
        tenant: whose request it is.

    Raises:
        InvalidRequestError: as `costed_job`.
    """
    key = tenant, spec, *[(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    checked: tuple[NormSpec, MemoryCost] | None = prepared.find(key, layer)
    if checked is not None:
        return NormJob(checked[0], dict(tensors), layer, may_overwrite), checked[1]
    job, cost = costed_job(spec, tensors, layer, may_overwrite=may_overwrite)
    axes = sum([len(tensor.shape) for tensor in tensors.values()])
    nbytes = _CHECK_BYTES + _TENSOR_BYTES * len(tensors) + _AXIS_BYTES * axes
    prepared.keep(key, (job.spec, cost), nbytes, tenant, layer)
    return job, cost
