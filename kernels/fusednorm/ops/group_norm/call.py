"""The checked arguments of GroupNorm's passes, and functions that the configurations of all algorithms use."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

from fusednorm.arguments.arrays import Array
from fusednorm.arguments.options import NormOptions
from fusednorm.devices.device_properties import can_start_early, count_multiprocessors
from fusednorm.launch.launches import (
    Launch,
    ResidentConfig,
    can_prefetch,
    compute_max_registers,
    has_one_lane_per_thread,
)
from fusednorm.ops.group_norm.affine_step import AffineParameters
from fusednorm.ops.group_norm.sample_shape import SampleShape, allocate_pair, compute_access_width
from fusednorm.results import Backward, Forward

NO_PARAMETERS = AffineParameters()

USUAL_REGISTERS = 20
"""The fewest registers that a thread needs besides those for its part of x and residual."""


def get_derivative_gain(activation: str, itemsize: int) -> float:
    """Return GAIN for backward kernels over elements of `itemsize` bytes: see `gradient_tiles`."""
    return 2.0 if itemsize == 2 and activation in ("silu", "gelu_tanh") else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNormCall:
    """The checked arguments that GroupNorm's forward and backward calls have in common."""

    x: Array
    sample: SampleShape
    affine: AffineParameters = NO_PARAMETERS
    options: NormOptions
    residual: Array | None = None

    @property
    def n(self) -> int:
        return self.x.shape[0]

    @property
    def can_start_early(self) -> bool:
        """Whether a kernel may start before the previous kernel ends."""
        return can_start_early(self.x.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNormForwardCall(GroupNormCall):
    """The checked arguments of one forward pass, and values derived from them for its launches."""

    out: Forward[Array]

    @property
    def tensors(self) -> tuple[Array | None, ...]:
        """x, residual, the parameters of the affine step, and the outputs."""
        return self.x, self.residual, *self.affine, self.out.y, self.out.residual_out

    @property
    def statistics(self) -> tuple[Array | None, ...]:
        return self.out.mean, self.out.rstd

    @property
    def group_vec(self) -> int:
        """Elements of one access for contiguous groups."""
        return compute_access_width(self.x.element_size(), self.sample.group_length)

    @property
    def group_vectors(self) -> int:
        return self.sample.group_length // self.group_vec

    @property
    def channel_indexing(self) -> tuple[int, ...]:
        """The channel arguments in vectors of `group_vec` elements if each has one channel, else in elements."""
        return self.compute_channel_arguments(self.group_vec if self.sample.hw % self.group_vec == 0 else 1)

    @property
    def is_skewed(self) -> bool:
        """Whether contiguous groups do not all start at multiples of 16 bytes, but samples do."""
        sample, vector = self.sample, 16 // self.x.element_size()
        return sample.group_length % vector != 0 and sample.c * sample.hw % vector == 0

    @property
    def has_one_lane_per_thread(self) -> bool:
        """Whether accesses to contiguous groups, which may be skewed, have 16 bytes: see `launch`."""
        width = 16 if self.is_skewed else self.group_vec * self.x.element_size()
        return has_one_lane_per_thread(width, self.x, self.residual, self.out.y, self.out.residual_out)

    @property
    def held_bytes(self) -> int:
        """Bytes of x and of residual for each element that a thread holds."""
        return self.x.element_size() + (0 if self.residual is None else self.residual.element_size())

    @property
    def fused_registers(self) -> int:
        """Registers that dropout or the activation needs in addition to USUAL_REGISTERS."""
        return 48 if self.options.dropout else 16 if self.options.activation == "gelu" else 0

    def compute_channel_arguments(self, unit: int) -> tuple[int, ...]:
        """Compute the kernel arguments from which a kernel finds the channel of a unit of `unit` elements.

        The arguments are the groups of a sample, the channels of a group, the divisor, multiplier and shift for
        a division by the units of a channel, and the stride of scale and shift between samples.
        """
        return (
            self.sample.groups,
            self.sample.group_channels,
            *_compute_division_constants(self.sample.hw // unit),
            self.affine.sample_stride,
        )

    def make_contiguous_options(self, tile_vectors: int, num_warps: int) -> dict[str, object]:
        """Make the launch options of the kernels that read contiguous groups in tiles of `tile_vectors` vectors.

        Options are a kernel's constexprs and its number of warps.
        """
        return {
            "VEC": self.group_vec,
            "UNITS": tile_vectors,
            "ALIGNED": self.sample.hw % self.group_vec == 0,
            "num_warps": num_warps,
            **self.options.constexprs,
        }

    @property
    def can_prefetch_groups(self) -> bool:
        """Whether the memory that is read for a contiguous group starts and ends at multiples of 16 bytes."""
        return can_prefetch(16 // self.x.element_size() if self.is_skewed else self.group_vec, self.x)

    @property
    def fragment_indexing(self) -> tuple[int, ...]:
        """The channel arguments in vectors of 16 bytes, or in elements if such a vector may have two channels."""
        vector = 16 // self.x.element_size()
        return self.compute_channel_arguments(vector if self.sample.hw % vector == 0 else 1)

    def find_parameter_unit(self, chunk_elements: int, fragment_elements: int) -> str:
        """Find the largest unit of a contiguous group whose elements always belong to one channel.

        A kernel loads each parameter once per unit.  The units are "piece" (`fragment_elements` elements), "chunk"
        (`chunk_elements` elements), "vector" (16 bytes) and "element"; "two" is a vector that may have two
        channels, but not more.
        """
        vector = 16 // self.x.element_size()
        for mode, length in (("piece", fragment_elements), ("chunk", chunk_elements), ("vector", vector)):
            if self.sample.hw % length == 0:
                return mode
        return "two" if self.sample.hw > vector else "element"

    def make_chunk_options(self, block: int, chunks: int, num_warps: int) -> dict[str, object]:
        """Make the launch options of kernels that load contiguous groups as `chunks` chunks of `block` elements.

        Options are a kernel's constexprs and its number of warps.
        """
        return {
            "VEC": self.group_vec,
            "BLOCK": block,
            "CHUNKS": chunks,
            "GROUP": 16 // self.x.element_size(),
            "num_warps": num_warps,
        }


def _compute_division_constants(divisor: int) -> tuple[int, int, int]:
    """Return the divisor, and the multiplier and shift for the division of any i < 2^31 by the divisor."""
    shift = (divisor - 1).bit_length()
    return divisor, -(-(1 << (31 + shift)) // divisor), shift


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNormBackwardCall(GroupNormCall):
    """The checked arguments of one backward pass, and values derived from them for its launches."""

    dy: Array
    mean: Array | None = None
    rstd: Array | None = None
    dresidual_out: Array | None = None
    out: Backward[Array]

    @property
    def inputs(self) -> tuple[Array | None, ...]:
        return self.dy, self.x, self.residual

    @property
    def gradient_options(self) -> dict[str, object]:
        """The constexprs for the computation of dz from dy."""
        gain = get_derivative_gain(self.options.activation, self.x.element_size())
        return {"GAIN": gain, **self.options.constexprs}

    @property
    def channel_vec(self) -> int:
        """Elements of one access for contiguous channels."""
        return compute_access_width(self.x.element_size(), self.sample.hw)

    @property
    def parameters(self) -> tuple[Array | None, ...]:
        """The tensors of `affine` as an argument of kernels."""
        return tuple(self.affine)

    def allocate_partials(self, splits: int) -> tuple[Array, Array]:
        """Allocate memory for the sums of dz and of dz * x_hat, float32 [N * splits, C] each."""
        return allocate_pair(self.x, self.n * splits, self.sample.c)

    def allocate_partials_if_wanted(self, splits: int) -> tuple[Array | None, Array | None]:
        """Allocate the memory of `allocate_partials` if the gradient of any parameter is wanted.

        Otherwise return (None, None); for kernels that write these sums only for the gradients of parameters.
        """
        out = self.out
        if out.dweight is out.dbias is out.dscale is out.dshift is None:
            return None, None
        return self.allocate_partials(splits)


class GroupNormForwardConfig(ABC):
    """Base class of the configurations of forward algorithms, such as tile sizes and numbers of warps.

    Each algorithm has a subclass, a frozen dataclass, which plans the algorithm's launches.
    """

    __slots__ = ()

    def can_be_resident(self, sample: SampleShape, itemsize: int, multiprocessors: int, can_wait: bool) -> bool:
        """Return whether programs that wait for one another, if any, are allowed to and fit the device together."""
        return True

    def reduce_residency(self, call: GroupNormForwardCall) -> Self | None:
        """Reduce the resident programs until the call's registers suffice; None if they never do."""
        return self

    @abstractmethod
    def plan_launches(self, call: GroupNormForwardCall) -> list[Launch]:
        """Plan the launches of the pass."""


class GroupNormBackwardConfig(ABC):
    """Base class of the configurations of backward algorithms, such as tile sizes and numbers of warps.

    Each algorithm has a subclass, a frozen dataclass, which plans the algorithm's launches.

    Attributes:
        needs_statistics: whether the call must have mean and rstd; otherwise the kernel computes absent
            ones.
    """

    __slots__ = ()

    needs_statistics: ClassVar[bool] = True
    """Whether the algorithm needs mean and rstd as inputs; if not, it computes them when the call has none."""

    @abstractmethod
    def plan_launches(self, call: GroupNormBackwardCall) -> list[Launch]:
        """Plan the launches of the pass."""


class _ResidentDataclass(ResidentConfig, Protocol):
    """The type of a configuration whose number of resident programs `fit_resident_programs` may reduce.

    The configuration is a dataclass, because `dataclasses.replace` makes the reduced copy.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]


Fewer = TypeVar("Fewer", bound=_ResidentDataclass)


def fit_resident_programs(
    config: Fewer, call: GroupNormForwardCall, held_bytes: int, extra_registers: int = 0, members: int = 1
) -> Fewer | None:
    """Reduce the number of resident programs of `config` until each thread has enough registers for its data.
    Return the changed copy.

    Fewer programs on a multiprocessor leave more registers for each thread.  The result is None if the
    registers do not suffice even for one program, or if fewer than `members` programs would be resident.

    Args:
        held_bytes: bytes of x and residual that a thread holds.
        extra_registers: further registers, in addition to those for dropout and the activation.
        members: programs that must be resident together.
    """
    multiprocessors = count_multiprocessors(call.x.device)
    for programs_per_sm in range(config.programs_per_sm, 0, -1):
        fewer = replace(config, programs_per_sm=programs_per_sm)
        if members > multiprocessors * programs_per_sm:
            return None
        if held_bytes // 4 + call.fused_registers + extra_registers + USUAL_REGISTERS <= compute_max_registers(
            fewer
        ):
            return fewer
    return None


def count_writers_per_group(groups: int, max_writers: int, multiprocessors: int) -> int:
    """Return how many programs write one group or block together, a power of two up to `max_writers`.

    The number is doubled while every program of all groups or blocks, of which there are `groups`, has a
    multiprocessor of its own.  The number does not change the bits of the result.
    """
    writers = 1
    while writers < max_writers and 2 * writers * groups <= multiprocessors:
        writers *= 2
    return writers
