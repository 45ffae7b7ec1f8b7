"""Conversion of a frame's operation to a job, and of the job's result to a response."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import UnsetType

from normserve.codec.api_names import is_parameter
from normserve.codec.local_messages import ComputeMessage, ComputeResponse, StageMilliseconds, TensorReference
from normserve.engine.engine import Engine
from normserve.errors import NotFoundError
from normserve.jobs.job import (
    MAX_COMPARED_PARAMETER_BYTES,
    NormJob,
    NormResult,
    NormSpec,
    Op,
    PassDirection,
    RegisteredLayer,
    ReplaySlot,
)
from normserve.jobs.memory_cost import MemoryCost
from normserve.jobs.result_specs import infer_result_specs
from normserve.layers.registry import LayerRegistry
from normserve.local.segment_table import SegmentTable, check_result_ranges, require_same_memory_kind
from normserve.memory.tensors import HostTensor
from normserve.metrics.request_metrics import RequestRecord
from normserve.requests.prepared_calls import PreparedCallCache, prepare_job
from normserve.requests.request_parameters import (
    find_layer_name,
    list_operation_parameters,
    make_spec,
    parse_query,
    suggest_operation,
)

_OPERATIONS = {(op.value, direction.value): (op, direction) for op in Op for direction in op.passes}
# Upper bounds of a cached `ParsedOperation`'s memory: a constant, and a factor for each byte of its parameters.
_OPERATION_BYTES, _BYTES_PER_KEY_BYTE = 2**10, 8

_WRITTEN_OVER = {PassDirection.FORWARD: {"y": "x"}, PassDirection.BACKWARD: {"dx": "x"}}


@dataclass(frozen=True, slots=True)
class ParsedOperation:
    """The parsed name, pass and parameters of an operation, before its tensors are checked.

    Attributes:
        layer: the registered layer's name; for a chain the names, joined by commas.
        timeout_ms: None where the server's default applies.
    """

    spec: NormSpec
    layer: str | None
    timeout_ms: float | None


def parse_operation(op_name: str, pass_name: str, query: str) -> ParsedOperation:
    """Parse an operation's name, its pass (forward or backward) and its query string of parameters.

    Raises:
        NotFoundError: there is no such operation or pass.
        InvalidParameterError: a parameter is invalid.
    """
    op_and_direction = _OPERATIONS.get((op_name, pass_name))
    if op_and_direction is None:
        known_operations = ", ".join([" ".join(each) for each in _OPERATIONS])
        raise NotFoundError(f"operations and passes are {known_operations}{suggest_operation(op_name)}")
    op, direction = op_and_direction
    values = parse_query(query.encode(), list_operation_parameters(op, direction))
    return ParsedOperation(make_spec(op, direction, values), find_layer_name(values), values.get("timeout_ms"))


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """The result of checking a request against the client's memory and the layer, kept for identical
    requests.  A job can be made from it without further checks.

    Attributes:
        spec: the operation with the options of the layer.
        tensors, result_buffers: views of the arena.
        compared_parameter_names: names of the tensors that are compared between jobs, which a launch reads for
            several jobs.
        overwrites_tensor: whether a result overwrites a tensor.
        replay_slot: that of the jobs; None where each job reads copies of its own.
        encoded_results: the encoded references to the results, for the response.
    """

    spec: NormSpec
    tensors: Mapping[str, HostTensor]
    result_buffers: Mapping[str, memoryview]
    compared_parameter_names: tuple[str, ...]
    overwrites_tensor: bool
    replay_slot: ReplaySlot | None
    cost: MemoryCost
    tensor_bytes: int
    encoded_results: msgspec.Raw

    def make_job(self, layer: RegisteredLayer | None) -> NormJob:
        """Make the job of one request from the plan.

        Parameters that are compared between jobs are copied, so that the client cannot change them meanwhile.

        Args:
            layer: the registered layer for which the plan was made, if any.
        """
        tensors = self.tensors
        if self.compared_parameter_names:
            # Parameters decide which jobs share a launch, and are read again by the launch, for all jobs: the bytes
            # compared must be the bytes read, whatever the client writes meanwhile.
            tensors = {**tensors, **{name: _copy_tensor(tensors[name]) for name in self.compared_parameter_names}}
        return NormJob(self.spec, tensors, layer, self.overwrites_tensor, self.result_buffers, self.replay_slot)


class ComputeRequest:
    """A parsed message that requests an operation, kept with its plan because clients repeat the same frame.

    Attributes:
        headers: the message's trace context, in the form of HTTP headers.
        operation: the parsed parameters; None until they have been parsed once.
        frame_content: the content of a frame with this message alone; None also for frames that are not kept.
    """

    __slots__ = ("__weakref__", "_plan", "frame_content", "headers", "message", "operation")

    def __init__(self, message: ComputeMessage) -> None:
        self.message = message
        self.frame_content: bytes | None = None
        traceparent = message.traceparent
        self.headers: Mapping[bytes, bytes] = (
            {} if isinstance(traceparent, UnsetType) else {b"traceparent": traceparent.encode()}
        )
        self.operation: ParsedOperation | None = None
        self._plan: RequestPlan | None = None

    def find_plan(self, layer: RegisteredLayer | None) -> RequestPlan | None:
        """Return the plan that was stored for this layer, or for no layer; None if there is none."""
        return self._plan if layer is None else layer.prepared_plans.get(self)

    def store_plan(self, plan: RequestPlan, layer: RegisteredLayer | None) -> None:
        """Store a plan in this request, or in the layer if one is used.  The plan is dropped with the request,
        or when the layer is replaced or deleted.
        """
        if layer is None:
            self._plan = plan
        else:
            layer.prepared_plans[self] = plan


@dataclass(frozen=True, slots=True)
class OperationPlanner:
    """A planner that checks operations against the client's memory and caches the resulting plans."""

    engine: Engine
    layers: LayerRegistry

    def plan_request(
        self, request: ComputeRequest, arena: SegmentTable, prepared: PreparedCallCache, record: RequestRecord
    ) -> tuple[RequestPlan, RegisteredLayer | None]:
        """Return the request's plan, made at its first occurrence, and the registered layer that it names, if any.

        Args:
            prepared: the connection's cache of parsed parameters and passed checks.

        Raises:
            NormserveError: the request is invalid, or the server is not ready.
        """
        record.current_stage = "parse"
        message, operation = request.message, request.operation
        if operation is None:
            operation = request.operation = _prepare_operation(message, prepared)
        spec = operation.spec
        record.op, record.direction = spec.op.label, spec.direction.label
        layer = None if operation.layer is None else self.layers.resolve(spec.op, operation.layer)
        self.engine.require_ready()
        plan = request.find_plan(layer)
        if plan is None:
            plan = self._make_plan(message, spec, layer, arena, prepared)
            request.store_plan(plan, layer)
        return plan, layer

    def _make_plan(
        self,
        message: ComputeMessage,
        spec: NormSpec,
        layer: RegisteredLayer | None,
        arena: SegmentTable,
        prepared: PreparedCallCache,
    ) -> RequestPlan:
        """Check a request's tensors and result buffers in the client's memory, and return the request's plan.  Also
        decide whether later jobs of the plan may share a launch with others, or replay a captured launch.
        """
        located = {name: arena.find_tensor(name, each) for name, each in message.tensors.items()}
        tensors = {name: tensor for name, (tensor, _) in located.items()}
        places = {name: arena.find_result_buffer(name, place) for name, place in message.results.items()}
        require_same_memory_kind(tensors, places)
        job, cost = prepare_job(prepared, "", spec, tensors, layer)
        results = infer_result_specs(
            job.spec, {name: (each.dtype, each.shape) for name, each in tensors.items()}, layer
        )
        spans = {name: span for name, (_, span) in located.items()}
        is_over = check_result_ranges(results, message.results, spans, _WRITTEN_OVER[spec.direction])
        recurrence = ReplaySlot()
        alike = NormJob(job.spec, tensors, layer, is_over, places, recurrence)
        recurrence.is_unbatched = job.is_on_device or self.engine.is_better_unbatched(alike)
        shared = () if recurrence.is_unbatched else _find_compared_parameter_names(tensors)
        described = {
            name: TensorReference(message.results[name].segment, message.results[name].offset, dtype.label, shape)
            for name, (dtype, shape) in results.items()
        }
        return RequestPlan(
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


def _prepare_operation(message: ComputeMessage, prepared: PreparedCallCache) -> ParsedOperation:
    """Parse a message's operation, or return the cached result if the connection sent the same parameters
    before.
    """
    key = message.op, message.direction, message.query
    operation: ParsedOperation | None = prepared.find(key)
    if operation is None:
        operation = parse_operation(*key)
        prepared.try_store(key, operation, _OPERATION_BYTES + _BYTES_PER_KEY_BYTE * sum(map(len, key)))
    return operation


def _find_compared_parameter_names(tensors: Mapping[str, HostTensor]) -> tuple[str, ...]:
    """Return the names of the small parameters, such as weights and biases.  Jobs may share a launch only if these
    have equal bytes.
    """
    names = filter(is_parameter, tensors)
    return tuple(name for name in names if tensors[name].nbytes <= MAX_COMPARED_PARAMETER_BYTES)


def make_response_and_complete_record(
    plan: RequestPlan, result: NormResult, request_id: str, record: RequestRecord, began: float
) -> ComputeResponse:
    """Make the response to an operation and complete its record.  The results are already in the client's memory.

    Args:
        began: start of the encoding, by `time.perf_counter`.
    """
    record.record_result(result, began)
    record.sent_bytes = sum([len(tensor.data) for tensor in result.tensors.values()])
    return ComputeResponse(
        request_id,
        plan.encoded_results,
        StageMilliseconds(
            1e3 * record.stage_seconds["recv"],
            1e3 * result.queue_s,
            1e3 * result.copy_in_s,
            1e3 * result.kernel_s,
            1e3 * result.copy_out_s,
        ),
        result.kernel_bytes,
        result.kernel_bandwidth,
        result.batch_size,
    )


def copy_tensors(tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """Copy the tensors to memory that no other process can write."""
    return {name: _copy_tensor(tensor) for name, tensor in tensors.items()}


def _copy_tensor(tensor: HostTensor) -> HostTensor:
    return HostTensor(tensor.dtype, tensor.shape, memoryview(bytearray(tensor.data)))
