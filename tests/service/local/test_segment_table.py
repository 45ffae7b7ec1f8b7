"""References into an arena: those that lie within it are views, all others are refused; results have places."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from normserve.codec.local_messages import ALIGNMENT, SegmentRange, TensorReference
from normserve.errors import NormserveError
from normserve.local.segment_table import ArenaRange, SegmentTable, check_result_ranges
from normserve.memory.tensors import FLOATS, DType

BYTES = 4096
NEAR = st.integers(0, BYTES + 64) | st.sampled_from([2**31, 2**32, 2**62, 2**63 - 16, 2**63 - 1])


@pytest.fixture(scope="module")
def arena():
    arena = SegmentTable()
    for number in range(2):
        assert arena.add_segment(memoryview(bytearray(BYTES))) == number
    del arena.segments[0]
    return arena


@given(segment=st.integers(0, 3), offset=NEAR, shape=st.lists(NEAR, max_size=3), dtype=st.sampled_from(FLOATS))
def test_a_tensor_lies_within_its_segment_or_is_refused(arena, segment, offset, shape, dtype):
    nbytes = prod(shape) * dtype.itemsize
    fits = segment == 1 and offset % ALIGNMENT == 0 and offset + nbytes <= BYTES
    try:
        tensor, span = arena.find_tensor("x", TensorReference(segment, offset, dtype.value, tuple(shape)))
    except NormserveError:
        # The others of a shape with a zero may be more than can be counted.
        assert not fits or prod(size for size in shape if size) * dtype.itemsize >= 2**63
        return
    assert fits
    assert len(tensor.data) == nbytes == span.stop - span.start
    assert tensor.data.obj is arena.segments[1].obj
    if nbytes:
        tensor.data[0] = 1
        assert arena.segments[1][offset] == 1
        tensor.data[0] = 0


@given(segment=st.integers(0, 2), offset=NEAR, nbytes=NEAR)
def test_a_place_lies_within_its_segment_or_is_refused(arena, segment, offset, nbytes):
    fits = segment == 1 and offset % ALIGNMENT == 0 and offset + nbytes <= BYTES
    try:
        place = arena.find_result_buffer("y", SegmentRange(segment, offset, nbytes))
    except NormserveError:
        assert not fits
        return
    assert fits
    assert len(place) == nbytes


SPANS = st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 6)).map(
    lambda drawn: ArenaRange(drawn[0], 16 * drawn[1], 16 * (drawn[1] + drawn[2]))
)


@given(st.tuples(SPANS, SPANS), st.tuples(SPANS, SPANS), st.booleans())
def test_results_overlap_nothing_but_the_tensor_that_they_may_be_written_over(tensors, places, may):
    given_ = dict(zip(("x", "residual"), tensors, strict=True))
    results = {
        name: (DType.FLOAT32, ((span.stop - span.start) // 4,))
        for name, span in zip(("y", "residual_out"), places, strict=True)
    }
    named = {
        name: SegmentRange(span.segment, span.start, span.stop - span.start)
        for name, span in zip(("y", "residual_out"), places, strict=True)
    }
    is_over = may and places[0] == tensors[0]
    others = [(places[0], tensors[1]), (places[1], tensors[0]), (places[1], tensors[1]), places]
    if not is_over:
        others.append((places[0], tensors[0]))
    allowed = not any(touched(one) & touched(other) and one.segment == other.segment for one, other in others)
    try:
        assert check_result_ranges(results, named, given_, {"y": "x"} if may else {}) == is_over
    except NormserveError:
        assert not allowed
    else:
        assert allowed


def touched(span: ArenaRange) -> set[int]:
    return set(range(span.start, span.stop))
