"""Conversion of a frame's operation to a job, and of the job's result to a response."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import UnsetType

from normserve.codec.local_frames import Compute, Done, Located, Stages
from normserve.codec.tensor_names import is_parameter
from normserve.engine.engine import Engine
from normserve.errors import NotFoundError
from normserve.jobs.job import (
    MAX_COMPARED_PARAMETER_BYTES,
    Layer,
    NormJob,
    NormResult,
    NormSpec,
    Op,
    Pass,
    Recurrence,
)
from normserve.jobs.memory_cost import MemoryCost
from normserve.jobs.results import results_of
from normserve.layers.registry import LayerRegistry
from normserve.local.arena import Arena, check_places, check_together
from normserve.memory.host_tensors import HostTensor
from normserve.metrics.requests import RequestRecord
from normserve.requests.parameters import make_spec, named_layer, operation_parameters, parse_query
from normserve.requests.prepared_calls import PreparedCalls
from normserve.requests.prepared_jobs import prepare_job

_OPERATIONS = {(op.value, direction.value): (op, direction) for op in Op for direction in op.passes}
# What a message asks for takes less than this when it is kept, and for each byte of its words.
_ASKED_BYTES, _BYTES_PER_ASKED_BYTE = 2**10, 8

_WRITTEN_OVER = {Pass.FORWARD: {"y": "x"}, Pass.BACKWARD: {"dx": "x"}}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for, checked as far as it can be without its tensors.

    Attributes:
        layer: its name; of a chain the names, joined by commas.
        timeout_ms: None where the server's holds.
    """

    spec: NormSpec
    layer: str | None
    timeout_ms: float | None


def asked_for(op_name: str, pass_name: str, query: str) -> Asked:
    """Read an operation's name, pass and parameters.

    Raises:
        NotFoundError: there is no such operation or pass.
        InvalidParameterError: by what is wrong with the parameters.
    """
    asked = _OPERATIONS.get((op_name, pass_name))
    if asked is None:
        known = ", ".join([" ".join(each) for each in _OPERATIONS])
        raise NotFoundError(f"operations and passes are {known}")
    op, direction = asked
    values = parse_query(query.encode(), operation_parameters(op, direction))
    return Asked(make_spec(op, direction, values), named_layer(values), values.get("timeout_ms"))


@dataclass(frozen=True, slots=True)
class Plan:
    """A request as it is checked against the arena and a layer: what comes again like it need not be checked again.

    Attributes:
        spec: with what the layer says.
        tensors, places: in the arena.
        shared: names of the tensors that a launch reads for other jobs as well.
        is_over: a result is written over a tensor.
        recurrence: of the jobs; None where each reads memory of its own.
        described: the results, as the answer says them.
    """

    spec: NormSpec
    tensors: Mapping[str, HostTensor]
    places: Mapping[str, memoryview]
    shared: tuple[str, ...]
    is_over: bool
    recurrence: Recurrence | None
    cost: MemoryCost
    nbytes: int
    described: msgspec.Raw

    def job(self, layer: Layer | None) -> NormJob:
        """Make the job of one request, with the layer that the plan was made with."""
        tensors = self.tensors
        if self.shared:
            # Parameters decide which jobs share a launch, and are read again by it, for all of them: what was
            # compared must be what is read, whatever the client writes meanwhile.
            tensors = {**tensors, **{name: _copy(tensors[name]) for name in self.shared}}
        return NormJob(self.spec, tensors, layer, self.is_over, self.places, self.recurrence)


class Request:
    """A message that asks for an operation, and what is known of it from when it last came.

    Attributes:
        headers: what it says of its trace, as headers of HTTP do.
        asked: None until its parameters have been read once.
        content: of its frame, if that has no other message; None also of frames that are not kept.
    """

    __slots__ = ("__weakref__", "_plan", "asked", "content", "headers", "message")

    def __init__(self, message: Compute) -> None:
        self.message = message
        self.content: bytes | None = None
        said = message.traceparent
        self.headers: Mapping[bytes, bytes] = {} if isinstance(said, UnsetType) else {b"traceparent": said.encode()}
        self.asked: Asked | None = None
        self._plan: Plan | None = None

    def find_plan(self, layer: Layer | None) -> Plan | None:
        """Return the plan that was made of it with this layer."""
        return self._plan if layer is None else layer.plans.get(self)

    def keep_plan(self, plan: Plan, layer: Layer | None) -> None:
        """Keep a plan for as long as the request is kept and the layer, if it has one, is registered."""
        if layer is None:
            self._plan = plan
        else:
            layer.plans[self] = plan


@dataclass(frozen=True, slots=True)
class Operations:
    """Checks operations."""

    engine: Engine
    layers: LayerRegistry

    def plan(
        self, request: Request, arena: Arena, prepared: PreparedCalls, record: RequestRecord
    ) -> tuple[Plan, Layer | None]:
        """Check a request against its arena and its layer, which are returned with the plan.

        Args: prepared: of the connection.

        Raises:
            NormserveError: the request is invalid, or the server is not ready.
        """
        record.waiting_in = "parse"
        message, asked = request.message, request.asked
        if asked is None:
            asked = request.asked = _prepare_asked(message, prepared)
        spec = asked.spec
        record.op, record.direction = spec.op.label, spec.direction.label
        layer = None if asked.layer is None else self.layers.named(spec.op, asked.layer)
        self.engine.require_ready()
        plan = request.find_plan(layer)
        if plan is None:
            plan = self._planned(message, spec, layer, arena, prepared)
            request.keep_plan(plan, layer)
        return plan, layer

    def _planned(
        self, message: Compute, spec: NormSpec, layer: Layer | None, arena: Arena, prepared: PreparedCalls
    ) -> Plan:
        located = {name: arena.tensor(name, each) for name, each in message.tensors.items()}
        tensors = {name: tensor for name, (tensor, _) in located.items()}
        places = {name: arena.place(name, place) for name, place in message.results.items()}
        check_together(tensors, places)
        job, cost = prepare_job(prepared, "", spec, tensors, layer)
        results = results_of(job.spec, {name: (each.dtype, each.shape) for name, each in tensors.items()}, layer)
        spans = {name: span for name, (_, span) in located.items()}
        is_over = check_places(results, message.results, spans, _WRITTEN_OVER[spec.direction])
        recurrence = Recurrence()
        alike = NormJob(job.spec, tensors, layer, is_over, places, recurrence)
        recurrence.is_alone = job.is_on_device or self.engine.computes_alone(alike)
        shared = () if recurrence.is_alone else _shared(tensors)
        described = {
            name: Located(message.results[name].segment, message.results[name].offset, dtype.label, shape)
            for name, (dtype, shape) in results.items()
        }
        return Plan(
            job.spec,
            tensors,
            places,
            shared,
            is_over,
            None if shared else recurrence,
            cost,
            job.nbytes,
            msgspec.Raw(msgspec.json.encode(described)),
        )


def _prepare_asked(message: Compute, prepared: PreparedCalls) -> Asked:
    """Do as `asked_for`, once for the messages of a connection that say the same."""
    key = message.op, message.direction, message.query
    asked: Asked | None = prepared.find(key)
    if asked is None:
        asked = asked_for(*key)
        prepared.keep(key, asked, _ASKED_BYTES + _BYTES_PER_ASKED_BYTE * sum(map(len, key)))
    return asked


def _shared(tensors: Mapping[str, HostTensor]) -> tuple[str, ...]:
    """The parameters by which jobs share a launch."""
    names = filter(is_parameter, tensors)
    return tuple(name for name in names if tensors[name].nbytes <= MAX_COMPARED_PARAMETER_BYTES)


def answered(plan: Plan, result: NormResult, request_id: str, record: RequestRecord, began: float) -> Done:
    """The answer to an operation, whose results lie where the request wanted them.

    Args: began: when it began to be written, by `time.perf_counter`.
    """
    record.note_result(result, began)
    record.sent = sum([len(tensor.data) for tensor in result.tensors.values()])
    return Done(
        request_id,
        plan.described,
        Stages(
            1e3 * record.stages["recv"],
            1e3 * result.queue_s,
            1e3 * result.copy_in_s,
            1e3 * result.kernel_s,
            1e3 * result.copy_out_s,
        ),
        result.kernel_bytes,
        result.kernel_bandwidth,
        result.batch_size,
    )


def copied(tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """The same tensors in memory that only this process writes."""
    return {name: _copy(tensor) for name, tensor in tensors.items()}


def _copy(tensor: HostTensor) -> HostTensor:
    return HostTensor(tensor.dtype, tensor.shape, memoryview(bytearray(tensor.data)))
