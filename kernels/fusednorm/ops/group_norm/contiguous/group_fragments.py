"""Fragments of contiguous groups that stay in registers in the dtype of memory: loads, moments, stores.

Groups may start and end at any element, and are read and written in 16-byte accesses.  The frame of a group starts
at the multiple of 16 bytes (GROUP elements) at or before the group's start.  Its first `before` elements, fewer
than GROUP, do not belong to the group; SKEWED: whether `before` may be above 0.  The size of a sample is a
multiple of 16 bytes, so a frame never leaves its sample, and all samples have equal frames.

A fragment is a tuple of chunks [lanes, GROUP] of BLOCK elements; a lane is the elements of a chunk that one thread
loads at once.  All chunks below FULL are full, except the first if SKEWED.  In a fragment, the group starts at
`before` and ends at `length`.
"""

import triton
import triton.language as tl

from fusednorm.jit.epilogue import activate_for_dtype, compute_keep_mask
from fusednorm.jit.loads import add_residual_chunk
from fusednorm.jit.reductions import multiply_for_uniform_sum, multiply_rounded
from fusednorm.ops.group_norm.affine_step import compute_slope_and_offset, load_affine_as_tuples
from fusednorm.ops.group_norm.contiguous.group_ranges import divide_by_multiplication


@triton.jit
def locate_frame(row, length, GROUP: tl.constexpr, SKEWED: tl.constexpr):
    """Compute where a group's 16-byte-aligned frame starts in x, and how many of the frame's elements precede
    the group.

    A frame starts at the last multiple of 16 bytes (GROUP elements) that is not after the group's start.
    `row` (int64) is the group's index among those of all samples, `length` its number of elements.
    """
    start = row * length
    if SKEWED:
        frame = start // GROUP * GROUP
        return frame, (start - frame).to(tl.int32)
    else:
        return start, 0


@triton.jit
def make_group_mask(element, before, length, SKEWED: tl.constexpr):
    """Make the mask of the elements of a fragment that belong to the group that is normalised.

    The group is before <= element < length; `before` is 0 unless SKEWED.
    """
    inside = element < length
    if SKEWED:
        inside = inside & (element >= before)
    return inside


@triton.jit
def count_group_elements(start, before, length, size, SKEWED: tl.constexpr):
    """Count how many of `size` elements, from `start` on in a fragment, belong to the group that is normalised.

    The group is the elements from `before` (0 unless SKEWED) up to `length`.
    """
    count = tl.minimum(tl.maximum(length - start, 0), size)
    if SKEWED:
        count -= tl.minimum(tl.maximum(before - start, 0), size)
    return count


@triton.jit
def round_up_to_vectors(count, GROUP: tl.constexpr):
    """Round `count` up to a multiple of GROUP elements, the size of a vector."""
    return (count + (GROUP - 1)) // GROUP * GROUP


@triton.jit
def load_chunk(ptr, element, length, IS_FULL: tl.constexpr, EVICT: tl.constexpr, SKEWED: tl.constexpr):
    """Load a chunk, [lanes, GROUP], at ptr + element.  GROUP elements are one access of a thread.

    Elements are 0 from `length` on or, if SKEWED, from the end of the last element's 16 bytes on.
    """
    if IS_FULL:
        return tl.load(ptr + element, eviction_policy=EVICT)
    elif SKEWED:
        first = tl.arange(0, element.shape[0])[:, None] * element.shape[1]
        mask = tl.broadcast_to(first < length, element.shape)
        return tl.load(ptr + element, mask=mask, other=0.0, eviction_policy=EVICT)
    else:
        return tl.load(ptr + element, mask=element < length, other=0.0, eviction_policy=EVICT)


@triton.jit
def store_chunk(
    ptr, element, value, before, length, IS_FULL: tl.constexpr, EVICT: tl.constexpr, SKEWED: tl.constexpr
):
    """Store a chunk, [lanes, GROUP], at ptr + element, except elements outside of the normalised group.

    The normalised group is the elements from `before` (0 unless SKEWED) up to `length`.  GROUP elements are
    one access of a thread.
    """
    value = value.to(ptr.dtype.element_ty)
    if IS_FULL:
        tl.store(ptr + element, value, eviction_policy=EVICT)
    elif SKEWED:
        GROUP: tl.constexpr = element.shape[1]
        first = tl.arange(0, element.shape[0])[:, None] * GROUP
        whole = (first >= before) & (first + GROUP <= length)
        tl.store(ptr + element, value, mask=tl.broadcast_to(whole, element.shape), eviction_policy=EVICT)
        size: tl.constexpr = element.shape[0] * GROUP
        if (before > 0) | (length < size):
            ends = make_group_mask(element, before, length, SKEWED) & (whole == 0)
            tl.store(ptr + element, value, mask=ends, eviction_policy=EVICT)
    else:
        tl.store(ptr + element, value, mask=element < length, eviction_policy=EVICT)


@triton.jit
def make_chunk_offsets(BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Make the offsets of a chunk's elements, [lanes, GROUP]."""
    return tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def load_group_fragment(
    ptr, at, length,
    FULL: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, EVICT: tl.constexpr,
    SKEWED: tl.constexpr = False,
):  # fmt: skip
    """Load a fragment of a group as a tuple of CHUNKS chunks [lanes, GROUP]; () if ptr is None.

    A fragment is adjacent elements held in registers.  A chunk is BLOCK elements, of which a thread loads
    GROUP at once.  The fragment starts at ptr + at; elements from `length` on are 0, as in `load_chunk`.
    """
    element = make_chunk_offsets(BLOCK, GROUP)
    chunks = ()
    if ptr is not None:
        for i in tl.static_range(CHUNKS):
            chunk = load_chunk(ptr + at + i * BLOCK, element, length - i * BLOCK, i < FULL, EVICT, SKEWED)
            chunks = chunks + (chunk,)
    return chunks


@triton.jit
def compute_group_lane_moments(
    chunks, residuals, before, length,
    FULL: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    SKEWED: tl.constexpr = False,
):  # fmt: skip
    """Compute each lane's moments over a fragment, [lanes, 1] each.  They are the count, the mean in two parts
    (mean + shift), and the sum of squared deviations.

    A lane is the elements that one thread loads.  The moments are computed in one pass about a pivot, the
    mean of the lane's first vector: with n vectors per lane, the error from cancellation is at most n *
    2^-24 of the result.
    """
    lanes: tl.constexpr = BLOCK // GROUP
    element = make_chunk_offsets(BLOCK, GROUP)
    start = tl.arange(0, lanes)[:, None] * GROUP
    first = add_residual_chunk(chunks, residuals, 0)
    if SKEWED:
        first = tl.where(make_group_mask(element, before, length, SKEWED), first, 0.0)
    if FULL > 0 and not SKEWED:
        pivot = tl.sum(first, 1, keep_dims=True) * (1.0 / GROUP)
    else:
        present = count_group_elements(start, before, length, GROUP, SKEWED).to(tl.float32)
        pivot = tl.sum(first, 1, keep_dims=True) / tl.maximum(present, 1.0)
    count = tl.zeros((lanes, 1), tl.float32)
    sum_1 = tl.zeros((lanes, 1), tl.float32)
    sum_2 = tl.zeros((lanes, 1), tl.float32)
    for i in tl.static_range(len(chunks)):
        d = add_residual_chunk(chunks, residuals, i) - pivot
        if i < FULL and not (SKEWED and i == 0):
            count += GROUP
        else:
            d = tl.where(make_group_mask(element + i * BLOCK, before, length, SKEWED), d, 0.0)
            count += count_group_elements(start + i * BLOCK, before, length, GROUP, SKEWED).to(tl.float32)
        sum_1 += tl.sum(d, 1, keep_dims=True)
        sum_2 += tl.sum(multiply_for_uniform_sum(d, d), 1, keep_dims=True)
    # Returned as a rounded mean and its rounding error, because the pivot may be far from the mean.
    distance = multiply_rounded(sum_1, 1.0 / tl.maximum(count, 1.0))
    mean = pivot + distance
    square = tl.maximum(sum_2 - sum_1 * distance, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return count, mean, (pivot - mean) + distance, square


@triton.jit
def unify_mean_across_threads(mean, rest, means, index, PARAMETERS: tl.constexpr):
    """Change mean and rest, but not their sum, so that all threads have the same mean.

    That mean is the element of `means` whose `index` is 0.

    After a reduction, the sum mean + rest is right in each thread, but the pairs of two threads may differ.
    If parameters are tiles, different threads may compute h - mean and the correction for rest, because each
    tile has the layout in which it was loaded.  If a chunk or fragment has a single value of each parameter,
    mean and rest are returned unchanged.
    """
    if PARAMETERS == "piece" or PARAMETERS == "chunk":
        return mean, rest
    else:
        # A sum of one number and zeros is that number in any order.
        anchor = tl.sum(tl.where(index == 0, means, 0.0))
        return anchor, (mean - anchor) + rest


@triton.jit
def _compute_channels(
    first, indexing, i: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    """Compute the channel of each unit of a fragment's chunk i.  Channels are counted from the first one of
    the group.

    The fragment starts `first` elements into the group.  The unit is PARAMETERS, see `load_chunk_affine`.
    If PARAMETERS is "two", the result is the channel of each vector's first element, and the next channel's
    offset in the vector.
    """
    next_channel = ()
    if PARAMETERS == "element" or PARAMETERS == "two":
        if PARAMETERS == "element":
            at = first + i * BLOCK + make_chunk_offsets(BLOCK, GROUP)
        else:
            at = first + i * BLOCK + tl.arange(0, BLOCK // GROUP)[:, None] * GROUP
        # The first vector may start before the group.
        channel = divide_by_multiplication(tl.maximum(at, 0), indexing[2], indexing[3], indexing[4], False)
        if PARAMETERS == "two":
            next_channel = next_channel + (((channel + 1) * indexing[2] - at).to(tl.int32),)
    else:
        vector = first // GROUP + i * (BLOCK // GROUP)
        if PARAMETERS == "vector":
            vector += tl.arange(0, BLOCK // GROUP)[:, None]
        channel = divide_by_multiplication(vector, indexing[2], indexing[3], indexing[4], False)
    # Limited for elements past the end, which are not written.
    return tl.minimum(channel, indexing[1] - 1), next_channel


@triton.jit
def load_chunk_affine(
    parameters, row, first, indexing,
    i: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    """Load the weight, bias, scale and shift that apply to chunk i of a fragment.

    The result is for `compute_chunk_slope_and_offset`.  The fragment starts `first` elements into group
    `row`.

    Args:
        indexing: groups of a sample, channels of a group, the division by a channel's length (in elements if
            PARAMETERS is "element" or "two", else in vectors), and the stride of scale and shift between
            samples.
        PARAMETERS: the unit with one channel: "piece" (the fragment), "chunk", "vector" or "element"; or
            "two" if a vector has at most two channels.
    """
    channel, next_channel = _compute_channels(first, indexing, i, BLOCK, GROUP, PARAMETERS)
    sample = row.to(tl.int32) // indexing[0]
    group_channel = (row.to(tl.int32) - sample * indexing[0]) * indexing[1]
    at = group_channel + channel
    affine = load_affine_as_tuples(parameters, at, sample * indexing[5] + at)
    if PARAMETERS == "two":
        at = group_channel + tl.minimum(channel + 1, indexing[1] - 1)
        return affine, load_affine_as_tuples(parameters, at, sample * indexing[5] + at), next_channel[0]
    else:
        return affine


@triton.jit
def compute_chunk_slope_and_offset(affine, rstd, mean_rest, GROUP: tl.constexpr, PARAMETERS: tl.constexpr):
    """Compute a and b so that a chunk's normalisation and affine step together are (h - mean) * a + b.

    `affine` is the result of `load_chunk_affine`.  The group's mean is mean + rest.
    """
    if PARAMETERS == "two":
        a, b = compute_slope_and_offset(affine[0], rstd, mean_rest)
        next_a, next_b = compute_slope_and_offset(affine[1], rstd, mean_rest)
        before_next = tl.arange(0, GROUP)[None, :] < affine[2]
        return tl.where(before_next, a, next_a), tl.where(before_next, b, next_b)
    else:
        return compute_slope_and_offset(affine, rstd, mean_rest)


@triton.jit
def store_normalised_group_fragment(
    chunks, residuals, affine, parameters, y_ptr, residual_out_ptr, base, row, first, before, length, group_length,
    indexing, mean, rest, rstd, epilogue, writer, writers,
    FULL: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PARAMETERS: tl.constexpr,
    SHARED: tl.constexpr, EVICT: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, SKEWED: tl.constexpr = False,
):  # fmt: skip
    """Normalise a fragment of a group, apply affine step, activation and dropout, and store y and h.

    A fragment is adjacent elements of a group, held in registers; h is x + residual.  If SHARED, several
    programs write the same group, and this one stores only the chunks i with i % writers == writer.

    Args:
        affine: parameters of the first chunk; those of each later chunk are loaded one chunk ahead.
        base: the offset of the fragment in the outputs.
        row, first: the group, and the fragment's start in the group, negative if the fragment starts
            `before` the group.
        mean, rest: the group's mean is mean + rest.
        epilogue: seed, threshold and scale of dropout, and the negative slope.
    """
    element = make_chunk_offsets(BLOCK, GROUP)
    for i in tl.static_range(len(chunks)):
        current = affine
        if PARAMETERS != "piece" and i + 1 < len(chunks):
            affine = load_chunk_affine(parameters, row, first, indexing, i + 1, BLOCK, GROUP, PARAMETERS)
        if SHARED:
            if i & (writers - 1) == writer:
                store_normalised_group_chunk(
                    add_residual_chunk(chunks, residuals, i), current, y_ptr, residual_out_ptr, base + i * BLOCK,
                    before - i * BLOCK, length - i * BLOCK, row, first + i * BLOCK, group_length, indexing,
                    mean, rest, rstd, epilogue, element,
                    i < FULL and not (SKEWED and i == 0), GROUP, PARAMETERS, EVICT,
                    ACTIVATION, DROPOUT, SKEWED,
                )  # fmt: skip
        else:
            store_normalised_group_chunk(
                add_residual_chunk(chunks, residuals, i), current, y_ptr, residual_out_ptr, base + i * BLOCK,
                before - i * BLOCK, length - i * BLOCK, row, first + i * BLOCK, group_length, indexing,
                mean, rest, rstd, epilogue, element,
                i < FULL and not (SKEWED and i == 0), GROUP, PARAMETERS, EVICT, ACTIVATION, DROPOUT, SKEWED,
            )  # fmt: skip


@triton.jit
def store_normalised_group_chunk(
    h, affine, y_ptr, residual_out_ptr, base, before, length, row, first, group_length, indexing,
    mean, rest, rstd, epilogue, element,
    IS_FULL: tl.constexpr, GROUP: tl.constexpr, PARAMETERS: tl.constexpr, EVICT: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, SKEWED: tl.constexpr = False,
):  # fmt: skip
    """Compute y of one chunk, h [lanes, GROUP], and store y and h `base` elements into the outputs.

    h is x + residual.  The chunk has `length` elements, and starts at element `first` of the group. h is
    stored only if residual_out_ptr is not None.
    """
    if residual_out_ptr is not None:
        store_chunk(residual_out_ptr + base, element, h, before, length, IS_FULL, "", SKEWED)
    a, b = compute_chunk_slope_and_offset(affine, rstd, rest, GROUP, PARAMETERS)
    y = activate_for_dtype((h - mean) * a + b, epilogue[3], y_ptr.dtype.element_ty, ACTIVATION)
    if DROPOUT:
        sample = row // indexing[0]
        position = (row - sample * indexing[0]) * group_length + first + element
        keep = compute_keep_mask(epilogue[0], sample, position, epilogue[1])
        y = tl.where(keep, y * epilogue[2], 0.0)
    store_chunk(y_ptr + base, element, y, before, length, IS_FULL, EVICT, SKEWED)
