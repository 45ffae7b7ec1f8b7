"""The descriptions of work that are passed from the routes to the device and back."""

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from normserve.codec.api_names import ACTIVATIONS, DEFAULT_SLOPE, OF_SAMPLES, PARAMETERS, is_parameter
from normserve.jobs.option_values import (
    RequestParameter,
    make_choice_parameter,
    parse_eps,
    parse_flag,
    parse_positive_integer,
    parse_probability,
    parse_seed,
    parse_slope,
    parse_zero_or_one,
)
from normserve.memory.tensors import FLOATS, DeviceTensor, DType, HostTensor

MAX_COMPARED_PARAMETER_BYTES = 64 * 1024
"""The largest parameters, in bytes, that are compared for batching: for larger ones a shared launch saves less time
than the comparison takes.
"""


class Op(Enum):
    """The norm operations; the value is the name in URLs and metrics."""

    LAYER_NORM = "layer_norm"
    RMS_NORM = "rms_norm"
    GROUP_NORM = "group_norm"
    LAYER_NORM_CHAIN = "layer_norm_chain"

    label: str
    """The value, in an attribute that is quicker to read than `value`."""

    __hash__ = object.__hash__

    def __init__(self, name: str) -> None:
        self.label = name

    @property
    def passes(self) -> "tuple[PassDirection, ...]":
        """The directions that the operation has: a chain has no gradients."""
        return (PassDirection.FORWARD,) if self is Op.LAYER_NORM_CHAIN else tuple(PassDirection)


LAYER_OPS = (Op.LAYER_NORM, Op.RMS_NORM, Op.GROUP_NORM)
"""The operations of which a layer can be registered; a chain consists of such layers."""


class PassDirection(Enum):
    """The direction of an operation: forward computes its results, and backward its gradients."""

    FORWARD = "forward"
    BACKWARD = "backward"

    label: str
    """The value, in an attribute that is quicker to read than `value`."""

    __hash__ = object.__hash__

    def __init__(self, name: str) -> None:
        self.label = name


class ChannelLayout(Enum):
    """The position of the channel axis of samples: [B, C, *spatial] or [B, *spatial, C]."""

    NCHW = "nchw"
    NHWC = "nhwc"

    __hash__ = object.__hash__


_LAYOUT_NAMES = [layout.value for layout in ChannelLayout]

ROW_OPS = (Op.LAYER_NORM, Op.RMS_NORM)
"""The operations that normalise rows with a single norm."""

OUT_DTYPE_OF_FLOATS = make_choice_parameter(
    "Element type of y; x's by default.", [dtype.value for dtype in FLOATS], DType
)
"""The parameter of operations whose y cannot have an 8-bit type."""

_OUT_DTYPE = make_choice_parameter(
    "Element type of y; x's by default. float8_e4m3fn comes with a scale for each row.",
    [dtype.value for dtype in DType],
    DType,
)


class NormOption(NamedTuple):
    """The declaration of one option of a norm operation, which is a field of `NormSpec`.

    Attributes:
        name: in the API, in the spec and in the kernel library.
        request_parameters: the request's parameter for it, by the operations that take it.
        passes: the directions that take it.
        is_layer_option: whether a registered layer has it, so that requests with the layer do not give
            it.
        get_kernel_key: from its value to the part that decides which kernels run; None if its value
            never does.
    """

    name: str
    request_parameters: Mapping[Op, RequestParameter]
    passes: tuple[PassDirection, ...]
    is_layer_option: bool
    get_kernel_key: Callable[[Any], Hashable] | None


def _make_identity_key(value: Hashable) -> Hashable:
    return value


def _declare_option(
    request_parameters: Mapping[Op, RequestParameter],
    passes: tuple[PassDirection, ...] = tuple(PassDirection),
    *,
    is_layer_option: bool = False,
    get_kernel_key: Callable[[Any], Hashable] | None = _make_identity_key,
) -> dict[str, Any]:
    """Return the metadata of a field of `NormSpec`, from which the field's `NormOption` is made."""
    return {
        "request_parameters": request_parameters,
        "passes": passes,
        "is_layer_option": is_layer_option,
        "get_kernel_key": get_kernel_key,
    }


@dataclass(frozen=True, slots=True)
class NormSpec:
    """One norm operation in one direction, with the values of all its options.

    Every option is declared here and nowhere else.  Channels that are last are no layout of LayerNorm and RMSNorm,
    and a seed without dropout is None, so that equal computations have equal specs.

    Attributes:
        num_groups: of GroupNorm, 0 for other operations.
        layout: of samples, which GroupNorm normalises by default as [B, C, *spatial], and LayerNorm and RMSNorm can
            normalise over their channels; None for rows [..., N], as which the latter take channels that are last.
        seed: of the dropout mask; None without dropout.
        out_dtype: of y; None means x's.
        kernel_key: the parts of the spec that decide which kernels run.
    """

    op: Op
    direction: PassDirection
    eps: float = field(
        metadata=_declare_option(
            dict.fromkeys(
                Op,
                RequestParameter(
                    "Added to the variance; 1e-5, or 1e-6 for rms_norm, by default.", parse_eps, {"type": "number"}
                ),
            ),
            is_layer_option=True,
            get_kernel_key=None,
        )
    )
    num_groups: int = field(
        default=0,
        metadata=_declare_option(
            {
                Op.GROUP_NORM: RequestParameter(
                    "Divides the channels.", parse_positive_integer, {"type": "integer", "minimum": 1}
                )
            },
            is_layer_option=True,
        ),
    )
    layout: ChannelLayout | None = field(
        default=None,
        metadata=_declare_option(
            {
                Op.GROUP_NORM: make_choice_parameter(
                    "Where the channels lie; nchw by default.", _LAYOUT_NAMES, ChannelLayout
                )
            }
            | dict.fromkeys(
                ROW_OPS,
                make_choice_parameter(
                    "Where the channels lie that are normalised over; nhwc, the last axis, by default.",
                    _LAYOUT_NAMES,
                    ChannelLayout,
                ),
            )
        ),
    )
    weight_offset: float = field(
        default=0.0,
        metadata=_declare_option(
            dict.fromkeys(
                ROW_OPS,
                RequestParameter(
                    "Added to weight: 1 for a weight that is kept around zero, as Gemma's; 0 by default.",
                    parse_zero_or_one,
                    {"enum": [0, 1]},
                ),
            ),
            is_layer_option=True,
        ),
    )
    activation: str = field(
        default="none",
        metadata=_declare_option(
            dict.fromkeys(LAYER_OPS, make_choice_parameter("Applied after the affine step.", ACTIVATIONS)),
            is_layer_option=True,
        ),
    )
    negative_slope: float = field(
        default=DEFAULT_SLOPE,
        metadata=_declare_option(
            dict.fromkeys(
                LAYER_OPS,
                RequestParameter(
                    "Factor of negative values in leaky_relu, which alone takes another than 0.01, the default.",
                    parse_slope,
                    {"type": "number"},
                ),
            ),
            is_layer_option=True,
            get_kernel_key=None,
        ),
    )
    dropout: float = field(
        default=0.0,
        metadata=_declare_option(
            dict.fromkeys(
                LAYER_OPS,
                RequestParameter("Probability of a zero, applied last.", parse_probability, {"type": "number"}),
            ),
            get_kernel_key=bool,
        ),
    )
    seed: int | None = field(
        default=None,
        metadata=_declare_option(
            dict.fromkeys(
                LAYER_OPS,
                RequestParameter("Of the dropout mask; required with dropout.", parse_seed, {"type": "integer"}),
            ),
            get_kernel_key=None,
        ),
    )
    out_dtype: DType | None = field(
        default=None,
        metadata=_declare_option(
            dict.fromkeys(Op, OUT_DTYPE_OF_FLOATS) | dict.fromkeys(ROW_OPS, _OUT_DTYPE), (PassDirection.FORWARD,)
        ),
    )
    stats: bool = field(
        default=False,
        metadata=_declare_option(
            dict.fromkeys(
                LAYER_OPS, RequestParameter("Also return mean and rstd.", parse_flag, {"type": "boolean"})
            ),
            (PassDirection.FORWARD,),
        ),
    )
    kernel_key: Hashable = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.op is Op.GROUP_NORM:
            if self.layout is None:
                object.__setattr__(self, "layout", ChannelLayout.NCHW)
        elif self.layout is ChannelLayout.NHWC:
            object.__setattr__(self, "layout", None)
        if not self.dropout:
            object.__setattr__(self, "seed", None)
        # Every request looks things up by its spec.
        keys = [
            each.get_kernel_key(getattr(self, each.name)) for each in OPTIONS if each.get_kernel_key is not None
        ]
        object.__setattr__(self, "kernel_key", (self.op, self.direction, *keys))
        values = [getattr(self, each.name) for each in OPTIONS]
        object.__setattr__(self, "_hash", hash((self.op, self.direction, *values)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_over_channels(self) -> bool:
        """Whether it is LayerNorm or RMSNorm over the channels of samples [B, C, *spatial], for each position."""
        return self.layout is not None and self.op is not Op.GROUP_NORM


OPTIONS = tuple([NormOption(each.name, **each.metadata) for each in fields(NormSpec) if each.metadata])
"""Every option, in the order in which the API's description has them."""

LAYER_OPTIONS = tuple([option for option in OPTIONS if option.is_layer_option])
"""The options that a registered layer has, and requests with the layer do not give."""


@functools.cache
def list_options(op: Op, direction: PassDirection) -> tuple[NormOption, ...]:
    """List the options that one operation takes in one direction."""
    return tuple([option for option in OPTIONS if op in option.request_parameters and direction in option.passes])


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RegisteredLayer:
    """Parameters registered under a name, with the options that apply to requests with that name.

    Attributes:
        spec: its operation, with the options that it has; the others have their defaults.
        size: N, or C of GroupNorm.
        nbytes: of the parameters.
        backend_parameters: the backend's own form of the parameters; opaque here, freed with the last job of the
            layer.
        heads: H where the parameters are [H, N], 0 where they are [N].
        parameter_types: the properties of the parameters that decide which kernels run.
        prepared_plans: of requests that name the layer, by request: freed with the request, and with the layer.
    """

    name: str
    spec: NormSpec
    size: int
    dtype: DType
    has_bias: bool
    nbytes: int
    backend_parameters: object = field(repr=False)
    heads: int = 0
    parameter_types: Hashable = ()
    prepared_plans: "WeakKeyDictionary[Hashable, Any]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    def __post_init__(self) -> None:
        if not self.parameter_types:
            object.__setattr__(self, "parameter_types", (self.dtype, self.has_bias))

    @property
    def op(self) -> Op:
        """The operation whose parameters it has."""
        return self.spec.op

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """The shape of its parameters, and of the units of x that they apply to: [N], or [H, N] with heads."""
        return (self.heads, self.size) if self.heads else (self.size,)


class ReplaySlot:
    """The state that recurring jobs share.  Such jobs use the same memory, and differ only in the memory's content.

    Attributes:
        prepared: the backend's own object, made of the first job for later ones; opaque elsewhere.
        is_unbatched: each job is computed by itself, in its client's memory.
    """

    __slots__ = ("__weakref__", "is_unbatched", "prepared")

    def __init__(self) -> None:
        self.prepared: object = None
        self.is_unbatched = False


@dataclass(slots=True, eq=False)
class NormJob:
    """The validated computation of one request: its tensors fit the spec and one another.  A job is never changed.

    Attributes:
        tensors: by their names in the API; with a layer, neither weight nor bias.  All are in the host's memory, or
            all of them `DeviceTensor`s: such a job runs alone, and its result buffers are `DeviceMemoryView`.
        layer: the registered parameters, if the request named some.
        may_overwrite: the tensors are not read after the job; results may be written over them.
        result_buffers: the caller's buffers for results, by their names in the API, each of at least their bytes;
            None if the backend chooses the memory.
        replay_slot: shared with the equal jobs before and after it; None if the job is not known to recur.
        nbytes: of all tensors of the request.
        rows: the number of independent units of x along its outermost axis: rows, or with a layout samples.
        unit_rows: the rows that stay together in a launch: H if each head of x [..., H, N] has parameters of its
            own, T if each T consecutive rows, those of a sample, share a scale, shift or gate; else 0.
    """

    spec: NormSpec
    tensors: Mapping[str, HostTensor]
    layer: RegisteredLayer | None = None
    may_overwrite: bool = False
    result_buffers: Mapping[str, memoryview] | None = None
    replay_slot: ReplaySlot | None = None
    nbytes: int = field(init=False)
    rows: int = field(init=False)
    unit_rows: int = field(init=False)

    def __post_init__(self) -> None:
        # Not frozen, as `Batch` is not.
        shape = self.tensors["x"].shape
        self.nbytes = sum([len(tensor.data) for tensor in self.tensors.values()])
        self.rows = prod(shape[:-1]) if self.spec.layout is None else shape[0]
        self.unit_rows = self._count_sample_rows() or self._count_heads()

    @property
    def x(self) -> HostTensor:
        """The tensor to normalise."""
        return self.tensors["x"]

    @property
    def is_on_device(self) -> bool:
        """Whether its tensors and its result buffers are in the device's memory."""
        return isinstance(self.tensors["x"], DeviceTensor)

    def compute_batch_class(self) -> Hashable | None:
        """Compute a key that is equal for jobs whose rows may share a launch; None if this job must run alone.

        Dropout's mask depends on the row's index and parameter gradients are sums over the rows, so either
        would differ in a shared launch.  scale, shift and gate are batched with their samples, which for LayerNorm
        and RMSNorm of rows must have equally many rows.
        """
        spec, tensors = self.spec, self.tensors
        if self.is_on_device or spec.dropout or (self.replay_slot is not None and self.replay_slot.is_unbatched):
            return None
        if len(tensors) == 1 and spec.direction is PassDirection.FORWARD:
            x = tensors["x"]
            return None if x.fortran_order else (spec, self._unit_shape, self.layer, ("x", x.dtype))
        if self.has_sums_over_rows or (self.unit_rows and not self.rows):
            return None
        members: list[Hashable] = []
        for name, tensor in sorted(tensors.items()):
            if tensor.fortran_order:
                return None
            if not is_parameter(name):
                members.append((name, tensor.dtype))
            elif tensor.nbytes > MAX_COMPARED_PARAMETER_BYTES:
                return None
            else:
                members.append((name, tensor.dtype, bytes(tensor.data)))
        return (spec, self._unit_shape, self.layer, *members)

    @property
    def has_sums_over_rows(self) -> bool:
        """Whether a result is a sum over rows, so that its bits may depend on the other rows of a launch.

        Gradients of scale, shift and gate are such sums, except GroupNorm's: a sample's rows are divided among
        programs, whose number depends on that of the samples.
        """
        if self.spec.direction is PassDirection.FORWARD:
            return False
        if self.layer is not None or any(map(is_parameter, self.tensors)):
            return True
        return self.spec.op is not Op.GROUP_NORM and any(name in self.tensors for name in OF_SAMPLES)

    def compute_kernel_class(self) -> Hashable:
        """Compute a key that is equal for jobs that run the same compiled kernels, whatever their numbers of
        rows.
        """
        layer = self.layer
        of_layer = None if layer is None else layer.parameter_types
        tensors = self.tensors
        if len(tensors) == 1:
            return (self.spec.kernel_key, self._unit_shape, of_layer, tensors["x"].dtype)
        dtypes = [(name, tensor.dtype) for name, tensor in sorted(tensors.items())]
        # The kernels are the same for any number of rows of a sample.
        shape = self._unit_shape[-1:] if self._count_sample_rows() else self._unit_shape
        return (self.spec.kernel_key, shape, of_layer, *dtypes)

    @property
    def _unit_shape(self) -> tuple[int, ...]:
        """The shape of one unit of x, which is a row or a sample.  A launch may have any number of units.

        A unit is a row, all heads of a row, the rows that share a scale, shift or gate, or with a layout a sample.
        """
        if self.spec.layout is not None:
            return self.x.shape[1:]
        cols = self.x.shape[-1:]
        return (self.unit_rows, *cols) if self.unit_rows else cols

    def _count_sample_rows(self) -> int:
        """Return T, at least 1, if each T consecutive rows of x share a scale, shift or gate; else 0."""
        if self.spec.layout is None:
            for name in OF_SAMPLES:
                given = self.tensors.get(name)
                if given is not None:
                    return max(1, self.rows // max(1, prod(given.shape[:-1])))
        return 0

    def _count_heads(self) -> int:
        """Return H if each head has parameters of its own, [H, N], in the layer or in the request; else 0."""
        if self.layer is not None:
            return self.layer.heads
        for name in PARAMETERS:
            parameter = self.tensors.get(name)
            if parameter is not None and len(parameter.shape) > 1:
                return parameter.shape[0]
        return 0


class QueueLane(Enum):
    """The two queues of jobs for a device, by size: small jobs overtake large ones, and neither queue starves."""

    SMALL = "small"
    LARGE = "large"

    __hash__ = object.__hash__


@dataclass(slots=True)
class Batch:
    """Jobs of one batch class, or a single job, which run as one launch; never changed.

    Attributes:
        nbytes: of all tensors of its requests.
    """

    jobs: tuple[NormJob, ...]
    lane: QueueLane = QueueLane.SMALL
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        # Not frozen: to set an attribute of a frozen class takes longer than this sum.
        self.nbytes = sum([job.nbytes for job in self.jobs])


class BatchResult(NamedTuple):
    """A backend's results for a batch, with the duration of each stage of the launch.

    Attributes:
        results: one mapping per job, in the batch's order, by the names of the API.
        copy_in_s: from the request's memory to the memory that the kernel reads.
        kernel_s: device time of the kernels.
        copy_out_s: back into host memory.
        kernel_bytes: for each job, the fewest bytes that its share of the launch must move on the device.
        has_filled_buffers: whether the results of jobs with result buffers are already in these.
    """

    results: tuple[Mapping[str, HostTensor], ...]
    kernel_bytes: tuple[int, ...]
    copy_in_s: float
    kernel_s: float
    copy_out_s: float
    has_filled_buffers: bool = False


class NormResult(NamedTuple):
    """The result of one request.

    Attributes:
        tensors: the outputs, by their names in the API.
        queue_s: from submission to the start of execution.
        copy_in_s, kernel_s, copy_out_s: of the whole launch.
        kernel_bytes: the fewest bytes that this request's share must move.
        launch_bytes: the fewest bytes that the whole launch must move.
        batch_size: requests in the launch.
        started_at: when the launch began, by `time.perf_counter`; with `launch_bytes` it identifies the launch.
    """

    tensors: Mapping[str, HostTensor]
    queue_s: float
    copy_in_s: float
    kernel_s: float
    copy_out_s: float
    kernel_bytes: int
    launch_bytes: int
    batch_size: int
    started_at: float

    @property
    def kernel_bandwidth(self) -> float:
        """Bytes per second of the launch; 0 if nothing was launched."""
        return self.launch_bytes / self.kernel_s if self.kernel_s > 0 else 0.0
