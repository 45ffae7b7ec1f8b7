"""The free parts of a segment."""

import bisect
from operator import itemgetter

_start_of = itemgetter(0)


class FreeRanges:
    """The pieces of a segment that are free: in order, and never side by side."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._ranges: list[tuple[int, int]] = [(0, nbytes)]

    @property
    def is_all_free(self) -> bool:
        """Whether all of the segment is free."""
        return self._ranges == [(0, self._nbytes)]

    def allocate(self, nbytes: int) -> int | None:
        """The offset of so many bytes; the first hole that has them is cut."""
        for index, (start, stop) in enumerate(self._ranges):
            if stop - start >= nbytes:
                if stop - start == nbytes:
                    del self._ranges[index]
                else:
                    self._ranges[index] = (start + nbytes, stop)
                return start
        return None

    def allocate_at(self, start: int, stop: int) -> bool:
        """Take just these, if all of them are free."""
        holes = self._ranges
        index = bisect.bisect(holes, start, key=_start_of) - 1
        if index < 0 or holes[index][1] < stop:
            return False
        first, last = holes.pop(index)
        if stop < last:
            holes.insert(index, (stop, last))
        if first < start:
            holes.insert(index, (first, start))
        return True

    def free(self, start: int, stop: int) -> None:
        """These are free again."""
        holes = self._ranges
        index = bisect.bisect(holes, (start, stop))
        if index < len(holes) and holes[index][0] == stop:
            stop = holes.pop(index)[1]
        if index and holes[index - 1][1] == start:
            index -= 1
            start = holes.pop(index)[0]
        holes.insert(index, (start, stop))
