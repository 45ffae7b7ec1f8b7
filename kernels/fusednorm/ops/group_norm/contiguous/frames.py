"""Contiguous groups that start and end anywhere, read and written in accesses of 16 bytes all the same.

The frame of a group starts at the 16 bytes in which the group does, GROUP elements; `before` of its elements, fewer
than GROUP, belong to what lies before the group.  SKEWED says whether there may be any.  Samples are whole 16
bytes, so that a frame never reaches into what is not there, and that all samples' frames are alike.
"""

import triton
import triton.language as tl


@triton.jit
def frame_of(row, length, GROUP: tl.constexpr, SKEWED: tl.constexpr):
    """Where the frame of the group `row`, int64, of `length` elements starts, and its elements before the group."""
    start = row * length
    if SKEWED:
        frame = start // GROUP * GROUP
        return frame, (start - frame).to(tl.int32)
    else:
        return start, 0


@triton.jit
def is_inside(element, before, length, SKEWED: tl.constexpr):
    """Which elements of a piece are its group's: those below `length` and, SKEWED, not below `before`."""
    inside = element < length
    if SKEWED:
        inside = inside & (element >= before)
    return inside


@triton.jit
def count_inside(start, before, length, size, SKEWED: tl.constexpr):
    """How many of `size` elements from `start` on are inside."""
    count = tl.minimum(tl.maximum(length - start, 0), size)
    if SKEWED:
        count -= tl.minimum(tl.maximum(before - start, 0), size)
    return count


@triton.jit
def whole_vectors(count, GROUP: tl.constexpr):
    """Elements of the vectors that the first `count` elements of a frame are in."""
    return (count + (GROUP - 1)) // GROUP * GROUP


@triton.jit
def load_chunk(ptr, element, length, IS_FULL: tl.constexpr, EVICT: tl.constexpr, SKEWED: tl.constexpr):
    """Elements of a chunk, [lanes, GROUP], from ptr on; past `length` 0 or, SKEWED, the rest of its 16 bytes."""
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
    """Elements of a chunk, [lanes, GROUP], to ptr on: those inside."""
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
            ends = is_inside(element, before, length, SKEWED) & (whole == 0)
            tl.store(ptr + element, value, mask=ends, eviction_policy=EVICT)
    else:
        tl.store(ptr + element, value, mask=element < length, eviction_policy=EVICT)
