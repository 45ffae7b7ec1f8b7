"""Contiguous groups with any start and end, read and written in 16-byte accesses.

The frame of a group starts at the multiple of 16 bytes (GROUP elements) at or before the group's start.  Its first
`before` elements, fewer than GROUP, do not belong to the group; SKEWED: whether `before` may be above 0.  The
size of a sample is a multiple of 16 bytes, so a frame never leaves its sample, and all samples have equal frames.
"""

import triton
import triton.language as tl


@triton.jit
def locate_frame(row, length, GROUP: tl.constexpr, SKEWED: tl.constexpr):
    """Compute the offset of the frame of a group in x, and the number of elements in it `before` the group.

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
    """Make the mask of a fragment's elements that belong to its group.

    These are before <= element < length (`before` only if SKEWED).
    """
    inside = element < length
    if SKEWED:
        inside = inside & (element >= before)
    return inside


@triton.jit
def count_group_elements(start, before, length, size, SKEWED: tl.constexpr):
    """Count the elements, of `size` from `start` on in a fragment, that belong to its group."""
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
    """Load a chunk, [lanes, GROUP], at ptr + element.

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
    """Store those elements of a chunk, [lanes, GROUP], that belong to its group, at ptr + element."""
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
