"""The free ranges of a segment."""

import bisect
from operator import itemgetter

_start_of = itemgetter(0)


class FreeRanges:
    """The free ranges of a segment, in order, with adjacent ranges merged."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._ranges: list[tuple[int, int]] = [(0, nbytes)]

    @property
    def is_all_free(self) -> bool:
        """Whether the entire segment is free."""
        return self._ranges == [(0, self._nbytes)]

    def allocate(self, nbytes: int) -> int | None:
        """Allocate from the first free range that is large enough; return the offset, or None where none is."""
        for index, (start, stop) in enumerate(self._ranges):
            if stop - start >= nbytes:
                if stop - start == nbytes:
                    del self._ranges[index]
                else:
                    self._ranges[index] = (start + nbytes, stop)
                return start
        return None

    def allocate_at(self, start: int, stop: int) -> bool:
        """Allocate exactly this range; return whether all of it was free."""
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
        """Free a range and merge it with its neighbours."""
        holes = self._ranges
        index = bisect.bisect(holes, (start, stop))
        if index < len(holes) and holes[index][0] == stop:
            stop = holes.pop(index)[1]
        if index and holes[index - 1][1] == start:
            index -= 1
            start = holes.pop(index)[0]
        holes.insert(index, (start, stop))
