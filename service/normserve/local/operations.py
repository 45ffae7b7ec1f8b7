"""A request of an operation, as a frame describes it, becomes a job, and its result an answer."""

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass

from normserve.admission.callers import Caller
from normserve.admission.permits import Limits, Permit
from normserve.codec.local_frames import Answer, Compute, Located
from normserve.engine.engine import Engine
from normserve.errors import NotFoundError
from normserve.jobs.job import MAX_COMPARED_PARAMETER_BYTES, NormJob, NormResult, NormSpec, Op, Pass
from normserve.jobs.results import PARAMETERS, results_of
from normserve.jobs.validation import costed_job
from normserve.layers.registry import LayerRegistry
from normserve.local.arena import Arena, check_places
from normserve.memory.host_tensors import HostTensor
from normserve.metrics.requests import RequestRecord
from normserve.requests.admission import Admission
from normserve.requests.parameters import make_spec, operation_parameters, parse_query

_OPS = {op.value: op for op in Op}
_PASSES = {direction.value: direction for direction in Pass}
_WRITTEN_OVER = {Pass.FORWARD: {"y": "x"}, Pass.BACKWARD: {"dx": "x"}}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for, checked as far as it can be without its tensors.

    Attributes:
        layer: its name.
        timeout_ms: None where the server's holds.
    """

    spec: NormSpec
    layer: str | None
    timeout_ms: float | None


@functools.lru_cache(maxsize=1024)
def asked_for(op_name: str, pass_name: str, query: str) -> Asked:
    """Read an operation's name, pass and parameters.

    Raises:
        NotFoundError: there is no such operation or pass.
        InvalidParameterError: by what is wrong with the parameters.
    """
    op, direction = _OPS.get(op_name), _PASSES.get(pass_name)
    if op is None or direction is None:
        raise NotFoundError(f"operations are {', '.join(_OPS)}, each with the passes {' and '.join(_PASSES)}")
    values = parse_query(query.encode(), operation_parameters(op, direction))
    return Asked(make_spec(op, direction, values), values.get("layer"), values.get("timeout_ms"))


@dataclass(frozen=True, slots=True)
class Operations:
    """What operations are run with."""

    engine: Engine
    layers: LayerRegistry
    limits: Limits
    admission: Admission
    timeout_ms: float

    def admit(
        self, message: Compute, arena: Arena, caller: Caller, record: RequestRecord
    ) -> tuple[NormJob, float, Permit]:
        """Check a request and take a permit for it: the job, its deadline by `time.perf_counter`, the permit.

        Raises:
            NormserveError: by what is wrong with it, or with the moment; no permit is held.
        """
        record.waiting_in = "parse"
        asked = asked_for(message.op, message.direction, message.query)
        record.op, record.direction = asked.spec.op.label, asked.spec.direction.label
        layer = None if asked.layer is None else self.layers.get(asked.layer)
        self.engine.require_ready()
        located = {name: arena.tensor(name, each) for name, each in message.tensors.items()}
        nbytes = sum([len(tensor.data) for tensor, _ in located.values()])
        permit = self.limits.acquire(nbytes, caller.tenant, caller.quota)
        try:
            tensors = {name: _shared(name, tensor) for name, (tensor, _) in located.items()}
            places = {name: arena.place(name, place) for name, place in message.results.items()}
            job, cost = costed_job(asked.spec, tensors, layer, places=places)
            results = results_of(
                job.spec, {name: (each.dtype, each.shape) for name, each in tensors.items()}, layer
            )
            spans = {name: span for name, (_, span) in located.items()}
            over = _WRITTEN_OVER[job.spec.direction]
            if check_places(results, message.results, spans, over):
                job = NormJob(job.spec, job.tensors, layer, may_overwrite=True, places=places)
            self.admission.charge(permit, job, cost, nbytes)
        except BaseException:
            permit.release()
            raise
        record.dtype = job.x.dtype.label
        record.received = nbytes
        record.stages["parse"] = time.perf_counter() - record.began
        record.waiting_in = "queue"
        timeout_ms = self.timeout_ms if asked.timeout_ms is None else asked.timeout_ms
        return job, record.began + timeout_ms / 1000, permit


def answered(message: Compute, result: NormResult, request_id: str, record: RequestRecord) -> Answer:
    """The answer to an operation, whose results lie where the request wanted them."""
    stages = record.stages
    stages |= {
        "queue": result.queue_s,
        "copy_in": result.copy_in_s,
        "kernel": result.kernel_s,
        "copy_out": result.copy_out_s,
    }
    places = message.results
    record.sent = sum([len(tensor.data) for tensor in result.tensors.values()])
    return Answer(
        status=200,
        request_id=request_id,
        results={
            name: Located(places[name].segment, places[name].offset, tensor.dtype.label, tensor.shape)
            for name, tensor in result.tensors.items()
        },
        stages_ms={
            "recv": 1e3 * stages["recv"],
            "queue": 1e3 * result.queue_s,
            "copy_in": 1e3 * result.copy_in_s,
            "kernel": 1e3 * result.kernel_s,
            "copy_out": 1e3 * result.copy_out_s,
        },
        kernel_bytes=result.kernel_bytes,
        kernel_bandwidth=result.kernel_bandwidth,
        batch_size=result.batch_size,
    )


def copied(tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """The same tensors in memory that only this process writes."""
    return {name: _copy(tensor) for name, tensor in tensors.items()}


def _shared(name: str, tensor: HostTensor) -> HostTensor:
    """The tensor as a launch may read it that others share.

    Parameters decide which jobs share one, and are read again by the launch, for all of them: what was compared
    must be what is read, whatever the client writes meanwhile.
    """
    is_shared = name in PARAMETERS and len(tensor.data) <= MAX_COMPARED_PARAMETER_BYTES
    return _copy(tensor) if is_shared else tensor


def _copy(tensor: HostTensor) -> HostTensor:
    return HostTensor(tensor.dtype, tensor.shape, memoryview(bytearray(tensor.data)))
