"""The checked arguments of LayerNorm's and RMSNorm's passes, and functions that their launches use."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from fusednorm.arguments.arrays import Array
from fusednorm.arguments.checks import MAX_HEADS, has_heads
from fusednorm.arguments.options import NormOptions
from fusednorm.devices.device_properties import can_start_early, count_multiprocessors
from fusednorm.errors import UnsupportedShapeError
from fusednorm.integers import compute_vector_width
from fusednorm.launch.launches import MAX_VEC, RowDependence, can_prefetch, has_one_lane_per_thread
from fusednorm.results import Backward, Forward

SINGLE_ROW_COLS = 524289
"""The row length from which a call with a single row uses the split algorithm, which divides the row into parts."""


_PROGRAM_A_ROW = RowDependence()


class RowStatistics(NamedTuple):
    """The outputs of a forward pass that computes only mean and rstd; mean is None for RMSNorm."""

    mean: Array | None
    rstd: Array


class RowLayout(NamedTuple):
    """The memory layout of the rows of a call's tensors: row length, strides, and width of an access.

    Attributes:
        heads: the layout of heads, a value of HEADS in `jit.heads`.
        vec: elements of one access, a divisor of the row length and of every stride.
        sizes: the row length and each tensor's stride between rows or between tokens, in units of `vec`.
    """

    heads: str
    vec: int
    sizes: tuple[int, ...]

    @classmethod
    def from_strides(cls, heads: str, cols: int, strides: tuple[int, ...], max_vec: int) -> "RowLayout":
        vec = compute_vector_width(max_vec, cols, *strides)
        sizes = (cols // vec, *[stride // vec for stride in strides])
        return cls(heads, vec, sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormCall:
    """The checked arguments that LayerNorm's and RMSNorm's forward and backward calls have in common.

    x is [rows, cols] or [tokens, heads, cols]; with a scale, shift or gate, [tokens, samples, cols].  If channels
    are first in memory, x is the view [positions, samples, channels] of contiguous [samples, channels, positions].

    Attributes:
        scale, shift, gate: [samples, cols] with one stride between samples, or None.
    """

    x: Array
    weight: Array | None = None
    bias: Array | None = None
    residual: Array | None = None
    scale: Array | None = None
    shift: Array | None = None
    gate: Array | None = None
    options: NormOptions

    @property
    def is_modulated(self) -> bool:
        """Whether each sample has a scale, a shift or a gate."""
        return not (self.scale is self.shift is self.gate is None)

    @property
    def is_plain(self) -> bool:
        """Whether there is no residual, activation or dropout."""
        return self.residual is None and not self.has_epilogue

    @property
    def has_epilogue(self) -> bool:
        """Whether there is an activation or dropout."""
        return self.options.activation != "none" or bool(self.options.dropout)

    @property
    def is_channels_first(self) -> bool:
        """Whether positions are adjacent in memory, not the channels of a position."""
        return self.cols > 1 and self.x.stride(-1) != 1

    @property
    def partial_shape(self) -> tuple[int, ...]:
        """The shape of one partial sum of the parameters' gradients: [cols], or that of each head or sample."""
        x = self.x
        return x.shape[-1:] if self.is_channels_first and not self.is_modulated else x.shape[1:]

    @property
    def heads_have_own_parameters(self) -> bool:
        """Whether each head of x has separate parameters."""
        return has_heads(self.weight, self.bias)

    @property
    def rows(self) -> int:
        """The number of rows, or of tokens if x has heads."""
        return self.x.shape[0]

    @property
    def cols(self) -> int:
        return self.x.shape[-1]

    @property
    def itemsize(self) -> int:
        """Bytes of an element of x."""
        return self.x.element_size()

    @property
    def multiprocessors(self) -> int:
        return count_multiprocessors(self.x.device)

    @property
    def can_start_early(self) -> bool:
        """Whether a kernel may start before the previous kernel ends."""
        return can_start_early(self.x.device)

    @property
    def strided_inputs(self) -> tuple[Array | None, ...]:
        """Inputs of x's shape, in the order of their strides in a launch."""
        return self.x, self.residual

    def make_grid(self, programs: int) -> tuple[int, ...]:
        """Make the grid of `programs` programs for each head or sample of x."""
        if self.is_modulated:
            return (programs * self.x.shape[1],)
        return (programs,) if self.x.ndim == 2 else (programs, self.x.shape[1])

    def compute_max_programs(self, programs_per_sm: int) -> int:
        """Compute the number of programs for each head of x that can be resident at the same time."""
        resident = self.multiprocessors * programs_per_sm
        return resident if self.x.ndim == 2 else max(1, resident // self.x.shape[1])

    @property
    def modulations(self) -> tuple[Array | None, ...]:
        """The tensors of each sample, in the order of the kernels' arguments."""
        return self.scale, self.shift, self.gate

    def modulation_arguments(self, vec: int) -> tuple[Any, ...]:
        """Return scale, shift, gate, the number of samples, and their stride in units of `vec` elements."""
        if not self.is_modulated:
            return *self.modulations, None, 0
        (stride, *_) = list_row_strides(self.cols, *filter(None, self.modulations))
        return *self.modulations, self.x.shape[1], stride // vec

    def make_common_constexprs(self, vec: int) -> dict[str, object]:
        """Make the constexprs that all LayerNorm kernels with an epilogue have in common.

        Sizes and strides are arguments in units of `vec` elements.  Each launch adds the constexprs of its own
        kernel.
        """
        return {"VEC": vec, **self.make_epilogue_constexprs()}

    def make_epilogue_constexprs(self) -> dict[str, object]:
        """Make the constexprs of the steps after the normalisation."""
        return {"WEIGHT_OFFSET": float(self.options.weight_offset), **self.options.constexprs}

    def check_no_heads(self) -> None:
        """Check that x has no heads, for kernels that do not support them.

        Raises:
            UnsupportedShapeError: there are heads.
        """
        if self.x.ndim > 2:
            raise UnsupportedShapeError(
                f"rows of {self.cols} columns are too long for separate parameters of each head, "
                "and for an x whose rows have two strides"
            )

    def make_row_layout(self, max_vec: int = MAX_VEC) -> RowLayout:
        """Make the layout of rows for kernels that do not support heads; `max_vec` limits an access's elements.

        Raises:
            UnsupportedShapeError: there are heads.
        """
        self.check_no_heads()
        return RowLayout.from_strides("none", self.cols, list_row_strides(self.cols, *self.strided_inputs), max_vec)

    def make_head_layout(self, max_vec: int = MAX_VEC) -> RowLayout:
        """Make the layout of rows or, if x has heads, of tokens with heads, for kernels that support both.

        `max_vec` limits an access's elements.

        Raises:
            UnsupportedShapeError: there are too many heads, or no kernel supports their strides.
        """
        cols, tensors = self.cols, self.strided_inputs
        if self.is_modulated:
            tokens, samples, _ = self.x.shape
            strides = tuple(
                cols if t is None or tokens * samples == 1 else t.stride(0) if tokens > 1 else t.stride(1)
                for t in tensors
            )
            vec = compute_vector_width(max_vec, cols, *strides, *list_row_strides(cols, *self.modulations))
            return RowLayout("samples", vec, (cols // vec, *[stride // vec for stride in strides]))
        if self.x.ndim == 2:
            return RowLayout.from_strides("none", cols, list_row_strides(cols, *tensors), max_vec)
        present = [tensor for tensor in tensors if tensor is not None]
        tokens, heads, _ = self.x.shape
        own_parameters = self.heads_have_own_parameters
        if heads > MAX_HEADS:
            raise UnsupportedShapeError(f"there must be at most {MAX_HEADS} heads, got {heads}")
        if heads == 1 or all(tensor.stride(1) == cols for tensor in present):
            return RowLayout.from_strides(
                "own" if own_parameters else "shared", cols, list_row_strides(cols, *tensors), max_vec
            )
        uniform = tokens == 1 or all(tensor.stride(0) == heads * tensor.stride(1) for tensor in present)
        if own_parameters and uniform:
            strides = tuple(cols if tensor is None else tensor.stride(1) for tensor in tensors)
            return RowLayout.from_strides("own_uniform", cols, strides, max_vec)
        raise UnsupportedShapeError(
            f"the heads of every token must lie {cols} elements apart, or all rows one constant stride apart, "
            f"got strides {', '.join(str(list(tensor.strides)) for tensor in present)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormForwardCall(LayerNormCall):
    """The checked arguments of one forward pass, and values derived from them for its launches."""

    out: Forward[Array] | RowStatistics

    @property
    def outputs(self) -> tuple[Array | None, ...]:
        """The outputs y, residual_out, mean and rstd, None where one is not wanted."""
        if isinstance(self.out, RowStatistics):
            return None, None, self.out.mean, self.out.rstd
        return self.out.y, self.out.residual_out, self.out.mean, self.out.rstd

    @property
    def y_scale(self) -> Array | None:
        """The tensor for the scales of float8 rows."""
        return None if isinstance(self.out, RowStatistics) else self.out.y_scale

    def make_float8_layout(self) -> RowLayout:
        """Make the layout of rows for a pass whose y is float8.

        Accesses have at most the elements of one 16-byte load of x: for wider stores of y the compiler would
        give a thread more elements.

        Raises:
            UnsupportedShapeError: there are heads.
        """
        if self.x.ndim > 2 and not self.is_modulated:
            raise UnsupportedShapeError("a float8 y needs rows one constant stride apart, and parameters [cols]")
        return self.make_head_layout(16 // self.itemsize)

    @property
    def tensors(self) -> tuple[Array | None, ...]:
        """The first arguments of the kernels that do not split a row."""
        return self.x, self.residual, self.weight, self.bias, *self.outputs

    def make_access_options(self, vec: int) -> dict[str, object]:
        """Make the constexprs that describe a thread's accesses, GROUP and NARROW.

        GROUP is the number of columns that a thread loads at once; NARROW, whether these have under 16 bytes.

        Rows that the split algorithm may also process are never NARROW, so that both algorithms give the same
        bits.
        """
        group = 16 // self.itemsize
        narrow = vec < group and self.cols < SINGLE_ROW_COLS
        return {"GROUP": vec if narrow else group, "NARROW": narrow}

    def can_prefetch_rows(self, layout: RowLayout) -> bool:
        """Return whether programs of one row each may prefetch rows and parameters into L2."""
        return layout.heads in ("none", "samples") and can_prefetch(
            layout.vec, self.x, self.weight, self.bias, self.residual
        )

    @property
    def one_row_dependence(self) -> RowDependence | None:
        """The dependence of a launch with one program per row on the number of rows; None with heads."""
        return _PROGRAM_A_ROW if len(self.x.shape) == 2 else None

    def can_merge_equal_sets(self, vec: int, access: dict[str, object], tensors: tuple[Array | None, ...]) -> bool:
        """Return whether a kernel may merge lanes' moments by `merge_equal_sets`, which is faster than
        `merge_sets`.

        `merge_equal_sets` needs one lane per thread.  The result is also True if accesses are NARROW, because a
        kernel then merges no lanes.  `access` is the result of `make_access_options`, and `tensors` are those of
        this call.
        """
        # Narrow accesses are not merged at all.
        return bool(access["NARROW"]) or has_one_lane_per_thread(min(16, vec * self.itemsize), *tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormBackwardCall(LayerNormCall):
    """The checked arguments of one backward pass, and values derived from them for its launches."""

    dy: Array
    mean: Array | None = None
    rstd: Array | None = None
    dresidual_out: Array | None = None
    out: Backward[Array]

    @property
    def strided_inputs(self) -> tuple[Array | None, ...]:
        """Inputs of x's shape, in the order of their strides in a launch."""
        return self.dy, self.x, self.residual, self.dresidual_out

    @property
    def tensors(self) -> tuple[Array | None, ...]:
        """The first arguments of the kernels that write dx."""
        return *self.strided_inputs, self.weight, self.bias

    @property
    def input_gradients(self) -> tuple[Array | None, ...]:
        """dx, and dresidual if it is a separate tensor."""
        return self.out.dx, None if self.out.dresidual is self.out.dx else self.out.dresidual

    @property
    def can_reduce_early(self) -> bool:
        """Whether a kernel that adds up partials follows and may start before the previous kernel ends."""
        out = self.out
        sums = out.dweight, out.dbias, out.dscale, out.dshift, out.dgate
        return self.can_start_early and any(gradient is not None for gradient in sums)


def list_row_strides(cols: int, *tensors: Array | None) -> tuple[int, ...]:
    """List each tensor's stride between rows or, if it has heads, between tokens, in elements.

    This is the stride of the first dimension.  For None or a single row, the stride is cols, which leaves accesses
    as
    wide as the other tensors allow.
    """
    return tuple([cols if tensor is None or tensor.shape[0] == 1 else tensor.stride(0) for tensor in tensors])
