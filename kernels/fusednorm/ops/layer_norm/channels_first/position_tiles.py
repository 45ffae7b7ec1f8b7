"""Tiles [channels, positions] of contiguous samples [N, C, *spatial]: their configuration, loads and moments.

A row, over which the norm is computed, is the channels of one position; the number of a row is sample * positions +
position.  The threads of a warp go along positions, which are adjacent in memory, so sums over channels are
computed in threads first, then among the threads and warps that share a position.  Offsets are int64: a sample may
have more than 2^31 elements.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from fusednorm.arguments.arrays import Array
from fusednorm.integers import cdiv, compute_vector_width
from fusednorm.jit.epilogue import activate, compute_transposed_keep_mask, differentiate_activation
from fusednorm.jit.loads import add_one, add_residual, add_weight_offset, make_column_mask, widen
from fusednorm.jit.reductions import multiply_for_uniform_sum, sum_pair
from fusednorm.launch.launches import MAX_VEC
from fusednorm.ops.layer_norm.call import LayerNormCall

_MOST_CHUNKS = 16
"""The most chunks of a tile: each is code of its own."""


@dataclass(frozen=True, slots=True)
class PositionTiles:
    """The positions of samples, in tiles of `block_p` positions with all channels or with blocks of channels.

    Attributes:
        samples, channels, positions: the sizes of x.
        vec: elements of one access, a divisor of the number of positions.
        group: elements that one thread loads at once; 1 if memory is not aligned.
    """

    samples: int
    channels: int
    positions: int
    block_p: int
    vec: int
    group: int

    @classmethod
    def of_call(cls, call: LayerNormCall, block_p: int, *arrays: Array | None) -> "PositionTiles":
        """Describe the positions of a call; `arrays` are all arrays of x's shape that are read or written."""
        positions, samples, channels = call.x.shape
        vec = compute_vector_width(min(MAX_VEC, block_p), positions)
        is_aligned = all(array is None or array.is_aligned for array in arrays)
        return cls(samples, channels, positions, block_p, vec, min(vec, 16 // call.itemsize) if is_aligned else 1)

    @property
    def tiles_per_sample(self) -> int:
        return cdiv(self.positions, self.block_p)

    def divide_among_programs(self, most: int, by_sample: bool) -> tuple[int, int]:
        """Divide the tiles among at most `most` programs, or a few more so that each sample has its own.

        Returns the number of samples with programs of their own, 1 unless `by_sample`, and the programs of each.
        """
        shares = self.samples if by_sample else 1
        tiles = self.samples * self.tiles_per_sample // shares
        return shares, min(tiles, max(1, most // shares))

    def compute_block_c(self, num_warps: int) -> int:
        """Compute the channels that the threads of a program hold one each of, a power of two and at least 4.

        Parameters of fewer channels than a program has threads are loaded by the threads that need them.
        """
        return max(4, 32 * num_warps * self.group // self.block_p)

    def make_channel_chunks(self, num_warps: int) -> dict[str, object]:
        """Make the constexprs that divide all channels into at most `_MOST_CHUNKS` chunks."""
        block_c = self.compute_block_c(num_warps)
        while block_c * _MOST_CHUNKS < self.channels:
            block_c *= 2
        chunks = cdiv(self.channels, block_c)
        return {"CHUNKS": chunks, "FULL": self.channels // block_c, **self.make_block_options(block_c)}

    def make_block_options(self, block_c: int) -> dict[str, object]:
        """Make the constexprs of blocks of `block_c` channels."""
        is_even = self.positions % self.block_p == 0
        return {"BLOCK_C": block_c, "BLOCK_P": self.block_p, "EVEN_P": is_even, "VEC": self.vec}

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of channels, and that of positions in units of `vec`."""
        return self.channels, self.positions // self.vec


def list_modulation_arguments(call: LayerNormCall) -> tuple[Any, ...]:
    """List scale, shift, gate, and the stride between samples."""
    *modulations, _, stride = call.modulation_arguments(1)
    return *modulations, stride


@triton.jit
def locate_tile(tile, positions, BLOCK_P: tl.constexpr):
    """Compute the sample (int64) of a tile, and its first position."""
    tiles = tl.cdiv(positions, BLOCK_P)
    sample = tile // tiles
    return sample.to(tl.int64), ((tile - sample * tiles) * BLOCK_P).to(tl.int32)


@triton.jit
def divide_tiles(program, programs, samples, tiles, MODULATED: tl.constexpr):
    """Determine the tiles of a program: each `step`-th one from a first one to the one before a last.

    Returns the first tile, the last, the step, the index of the program's partial sums, and, if MODULATED, the
    sample of all its tiles; else 0.  `tiles` is the number of a sample's tiles; sums of MODULATED calls are
    [programs / samples, samples] rows.
    """
    program = program.to(tl.int64)
    if MODULATED:
        step = programs // samples
        sample = program // step
        first = sample * tiles + program % step
        return first, (sample + 1) * tiles, step, (program % step) * samples + sample, sample
    else:
        return program, tiles.to(tl.int64) * samples, programs, program, program * 0


@triton.jit
def make_block_offsets(position, positions, BLOCK_C: tl.constexpr):
    """Make the offsets [BLOCK_C, BLOCK_P] of adjacent channels at given positions from the first channel."""
    return tl.arange(0, BLOCK_C)[:, None].to(tl.int64) * positions + position


@triton.jit
def make_chunk_mask(position_mask, i: tl.constexpr, channels, FULL: tl.constexpr, BLOCK_C: tl.constexpr):
    """Make the mask of the elements of chunk i that exist; the first FULL chunks have all of their channels."""
    return make_column_mask(i * BLOCK_C + tl.arange(0, BLOCK_C)[:, None], channels, i < FULL) & position_mask


@triton.jit
def load_channel_chunks(
    ptr, start, offsets, position_mask, channels, positions,
    FULL: tl.constexpr, BLOCK_C: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Load all channels of some positions as a tuple of CHUNKS tiles [BLOCK_C, BLOCK_P], in the dtype of memory.

    The tuple is empty if ptr is None.  `start` is the sample's offset in elements, `offsets` the result of
    `make_block_offsets`; elements that do not exist are 0.
    """
    chunks = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            mask = make_chunk_mask(position_mask, i, channels, FULL, BLOCK_C)
            at = start + tl.cast(i * BLOCK_C, tl.int64) * positions
            chunks = chunks + (tl.load(ptr + at + offsets, mask=mask, other=0.0),)
    return chunks


@triton.jit
def load_channel_parameter(ptr, start, channels, FULL: tl.constexpr, BLOCK_C: tl.constexpr, CHUNKS: tl.constexpr):
    """Load a parameter of each channel as a tuple of CHUNKS vectors [BLOCK_C], in the dtype of memory.

    The tuple is empty if ptr is None.  `start` is the offset of the first channel.  As a tile [BLOCK_C, 1] each
    thread would load a copy for each of its positions.
    """
    chunks = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            channel = i * BLOCK_C + tl.arange(0, BLOCK_C)
            mask = make_column_mask(channel, channels, i < FULL)
            chunks = chunks + (tl.load(ptr + start + channel, mask=mask, other=0.0),)
    return chunks


@triton.jit
def compute_factor(weights, scales, i: tl.constexpr, BLOCK_C: tl.constexpr, WEIGHT_OFFSET: tl.constexpr):
    """Compute chunk i of the factor of x_hat, (weight + WEIGHT_OFFSET) * (1 + scale), [BLOCK_C, 1] float32."""
    factor = tl.full((BLOCK_C,), 1.0, tl.float32)
    if len(weights) > 0:
        factor = add_weight_offset(weights[i].to(tl.float32), WEIGHT_OFFSET)
    if len(scales) > 0:
        factor = factor * add_one(scales[i])
    return factor[:, None]


@triton.jit
def compute_addend(biases, scales, shifts, i: tl.constexpr, BLOCK_C: tl.constexpr):
    """Compute chunk i of the addend after that factor, bias * (1 + scale) + shift, [BLOCK_C, 1] float32."""
    addend = tl.zeros((BLOCK_C,), tl.float32)
    if len(biases) > 0:
        addend = biases[i].to(tl.float32)
        if len(scales) > 0:
            addend = addend * add_one(scales[i])
    if len(shifts) > 0:
        addend = addend + shifts[i].to(tl.float32)
    return addend[:, None]


@triton.jit
def select_gate(gates, i: tl.constexpr):
    """Select chunk i of the gate as a tuple of one tile [BLOCK_C, 1]; () if there is no gate."""
    gate = ()
    if len(gates) > 0:
        gate = (gates[i][:, None],)
    return gate


@triton.jit
def compute_sum_chunk(chunks, residuals, gates, i: tl.constexpr):
    """Compute chunk i of h = residual + gate * x in float32; h is x if `residuals` is empty.

    The tuples are loaded tiles of x and of the residual, and vectors of the gate, in the dtype of memory.
    """
    if len(residuals) > 0:
        return add_residual(chunks[i], residuals[i], select_gate(gates, i))
    else:
        return widen(chunks[i])


@triton.jit
def compute_position_moments(chunks, residuals, gates, channels, FULL: tl.constexpr, IS_RMS: tl.constexpr):
    """Compute the mean over channels of each position, in two parts (pivot + shift), and the variance.

    Returns [1, BLOCK_P] each.  The mean is pivot + shift; subtract the pivot first, then the shift.  For RMSNorm
    both are 0, and the variance is the mean of squares.  `chunks`, `residuals` and `gates` are the tuples of
    `compute_sum_chunk`.

    The chunks are converted to float32 in each of two passes, so that registers hold the dtype of memory only.
    """
    BLOCK_C: tl.constexpr = chunks[0].shape[0]
    n = channels.to(tl.float32)
    squares = tl.zeros(chunks[0].shape, tl.float32)
    if IS_RMS:
        for i in tl.static_range(len(chunks)):
            h = compute_sum_chunk(chunks, residuals, gates, i)
            squares += multiply_for_uniform_sum(h, h, 0) if i == 0 else h * h
        variance = tl.sum(squares, 0, keep_dims=True) / n
        pivot = tl.zeros_like(variance)
        shift = pivot
    else:
        total = tl.zeros(chunks[0].shape, tl.float32)
        for i in tl.static_range(len(chunks)):
            total += compute_sum_chunk(chunks, residuals, gates, i)
        pivot = tl.sum(total, 0, keep_dims=True) / n
        shifts = tl.zeros(chunks[0].shape, tl.float32)
        for i in tl.static_range(len(chunks)):
            d = compute_sum_chunk(chunks, residuals, gates, i) - pivot
            if i >= FULL:
                d = tl.where(tl.arange(0, BLOCK_C)[:, None] + i * BLOCK_C < channels, d, 0.0)
            shifts += d
            squares += multiply_for_uniform_sum(d, d, 0) if i == 0 else d * d
        shift, square = sum_pair(shifts, squares, 0)
        shift = shift / n
        variance = tl.maximum(square / n - shift * shift, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return pivot, shift, variance


@triton.jit
def apply_channel_affine(
    x_hat, weights, biases, scales, shifts, i: tl.constexpr, BLOCK_C: tl.constexpr, WEIGHT_OFFSET: tl.constexpr
):
    """Apply the affine step, scale and shift to chunk i; each tuple of loaded parameters may be empty."""
    z = x_hat
    if len(weights) + len(scales) > 0:
        z = z * compute_factor(weights, scales, i, BLOCK_C, WEIGHT_OFFSET)
    if len(biases) + len(shifts) > 0:
        z = z + compute_addend(biases, scales, shifts, i, BLOCK_C)
    return z


@triton.jit
def apply_channel_epilogue(
    y, row, first_channel, seed, dropout_threshold, dropout_scale, negative_slope,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Apply the activation and dropout to a tile [channels, positions]; `row` is [1, positions] int64."""
    y = activate(y, negative_slope, ACTIVATION)
    if DROPOUT:
        keep = compute_transposed_keep_mask(
            seed, row, first_channel // 4, dropout_threshold, y.shape[0], y.shape[1]
        )
        y = tl.where(keep, y * dropout_scale, 0.0)
    return y


@triton.jit
def backpropagate_channel_epilogue(
    dy, x_hat, weight, bias, row, first_channel, seed, dropout_threshold, dropout_scale, negative_slope,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Compute dz, the gradient of the affine steps' output z = x_hat * weight + bias, from dy.

    The tiles are [channels, positions] from `first_channel` on; `row` is [1, positions] int64.
    """
    dz = dy
    if DROPOUT:
        keep = compute_transposed_keep_mask(
            seed, row, first_channel // 4, dropout_threshold, dy.shape[0], dy.shape[1]
        )
        dz = tl.where(keep, dz * dropout_scale, 0.0)
    if ACTIVATION != "none":
        dz = dz * differentiate_activation(x_hat * weight + bias, negative_slope, ACTIVATION)
    return dz


@triton.jit
def sum_adjacent_positions(terms, GROUP: tl.constexpr):
    """Sum the terms [BLOCK_C, BLOCK_P] of each thread's accesses of GROUP positions."""
    if GROUP == 1:
        return terms
    else:
        return tl.sum(tl.reshape(terms, (terms.shape[0], terms.shape[1] // GROUP, GROUP)), 2)
