"""The shared memory of one connection, and the validation of references into it.  Pure arithmetic and views."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

from normserve.codec.local_messages import ALIGNMENT, SegmentRange, TensorReference
from normserve.codec.shapes import count_bits_within_limits
from normserve.errors import InvalidParameterError, InvalidShapeError, UnsupportedDtypeError
from normserve.jobs.result_specs import Described
from normserve.memory.device_segments import DeviceMemoryView
from normserve.memory.tensors import FLOATS, DeviceTensor, HostTensor

_DTYPES = {dtype.value: dtype for dtype in FLOATS}
_LONGEST_NAME = 64


class ArenaRange(NamedTuple):
    """A range of bytes in one of the connection's shared memory segments.

    Attributes:
        start, stop: offsets in the segment.
    """

    segment: int
    start: int
    stop: int

    def has_overlap(self, other: "ArenaRange") -> bool:
        """Return whether any byte belongs to both ranges."""
        return self.segment == other.segment and max(self.start, other.start) < min(self.stop, other.stop)


class SegmentTable:
    """The shared memory segments of one connection, by number.  A removed segment's number is not used again.

    Attributes:
        segments: a view of each segment, in the host's memory or a device's (`DeviceMemoryView`); a view
            keeps its segment mapped, even after its removal here.
    """

    def __init__(self) -> None:
        self.segments: dict[int, memoryview] = {}
        self._next_number = 0

    def add_segment(self, memory: memoryview) -> int:
        """Add the memory of a segment, and return the segment's new number."""
        number = self._next_number
        self._next_number += 1
        self.segments[number] = memory
        return number

    def has_segments(self, references: Iterable[TensorReference | SegmentRange]) -> bool:
        """Return whether the segments of all these references are still in the table."""
        return all(each.segment in self.segments for each in references)

    def find_tensor(self, name: str, located: TensorReference) -> tuple[HostTensor, ArenaRange]:
        """Return a view of the tensor that a reference describes, and the range of its bytes.

        Raises:
            UnsupportedDtypeError: the element type is not supported.
            MalformedPayloadError: the shape requires more bytes than 63 bits can count.
            InvalidParameterError: the bytes are not within a segment of this arena, or not aligned.
        """
        dtype = _DTYPES.get(located.dtype)
        if dtype is None:
            expected = ", ".join(_DTYPES)
            raise UnsupportedDtypeError(
                f"{_format_label(name)} must be {expected}, got {located.dtype[:_LONGEST_NAME]!r}"
            )
        nbytes = count_bits_within_limits(located.shape, 8 * dtype.itemsize) // 8
        data = self._find_bytes(name, located.segment, located.offset, nbytes)
        span = ArenaRange(located.segment, located.offset, located.offset + nbytes)
        kind = DeviceTensor if isinstance(data, DeviceMemoryView) else HostTensor
        return kind(dtype, located.shape, data), span

    def find_result_buffer(self, name: str, place: SegmentRange) -> memoryview:
        """Return a view of the range to which a result is to be written.

        Raises:
            InvalidParameterError: the range is not within a segment of this arena, or not aligned.
        """
        return self._find_bytes(name, place.segment, place.offset, place.nbytes)

    def _find_bytes(self, name: str, number: int, offset: int, nbytes: int) -> memoryview:
        """Return a view of a range in a numbered segment; raise an error if the range is misaligned or exceeds
        the segment.  `name`, a tensor's or result's, is for the message.
        """
        segment = self._find_segment(name, number)
        if offset % ALIGNMENT:
            raise InvalidParameterError(
                f"the offset of {_format_label(name)} must be a multiple of {ALIGNMENT}, got {offset}"
            )
        # Python's numbers do not wrap.
        if offset + nbytes > len(segment):
            raise InvalidParameterError(
                f"{_format_label(name)} must end within its segment of {len(segment)} bytes, "
                f"ends at {offset + nbytes}"
            )
        return segment[offset : offset + nbytes]

    def _find_segment(self, name: str, number: int) -> memoryview:
        """Return the memory of a numbered segment; raise InvalidParameterError, with `name` in the message, if
        there is none.
        """
        try:
            return self.segments[number]
        except KeyError:
            raise InvalidParameterError(
                f"{_format_label(name)} must lie in a segment of this connection's arena"
            ) from None


def require_same_memory_kind(tensors: Mapping[str, HostTensor], places: Mapping[str, memoryview]) -> None:
    """Raise an error unless all tensors and result buffers of a request are in host memory, or all in device
    memory.

    Raises:
        InvalidParameterError: they are not.
    """
    are_on_device = [isinstance(tensor, DeviceTensor) for tensor in tensors.values()]
    are_on_device += [isinstance(place, DeviceMemoryView) for place in places.values()]
    if len(set(are_on_device)) > 1:
        raise InvalidParameterError(
            "tensors and places of a request must all be in host memory or all in device memory, they are not"
        )


def check_result_ranges(
    results: Described,
    result_ranges: Mapping[str, SegmentRange],
    tensors: Mapping[str, ArenaRange],
    overwritable: Mapping[str, str],
) -> bool:
    """Check that the request names a large enough range for each result, and that no two ranges overlap.

    Args:
        results: dtype and shape of each result.
        result_ranges: the range for each result.
        tensors: the ranges of the request's tensors.
        overwritable: for a result, the tensor that it may overwrite, in exactly the same range.

    Returns:
        Whether a result overwrites a tensor.

    Raises:
        InvalidParameterError: a result has no range, or its range overlaps another or a tensor's.
        InvalidShapeError: a range has too few bytes.
    """
    result_spans: list[tuple[str, ArenaRange]] = []
    is_over = False
    for name, (dtype, shape) in results.items():
        place = result_ranges.get(name)
        if place is None:
            raise InvalidParameterError(f"the request must name a place for {name}, it does not")
        nbytes = prod(shape) * dtype.itemsize
        if place.nbytes < nbytes:
            raise InvalidShapeError(f"the place for {name} must have {nbytes} bytes, it has {place.nbytes}")
        span = ArenaRange(place.segment, place.offset, place.offset + nbytes)
        for other, theirs in (*result_spans, *tensors.items()):
            if theirs == span and overwritable.get(name) == other:
                is_over = True
            elif span.has_overlap(theirs):
                raise InvalidParameterError(
                    f"the place for {name} must not overlap {_format_label(other)}, it does"
                )
        result_spans.append((name, span))
    return is_over


def _format_label(name: str) -> str:
    """Quote a tensor's name for an error message, shortened to 64 characters."""
    return repr(name[:_LONGEST_NAME])
