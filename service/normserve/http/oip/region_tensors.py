"""Copies between system shared memory and slabs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from normserve.errors import OverloadedError
from normserve.http.oip.regions.file_regions import FileRegion
from normserve.http.oip.regions.region_registry import RegionRange
from normserve.memory.slabs import SlabPool
from normserve.memory.thread_allocation import make_on_thread

# A shorter copy takes no longer than a hand-over to another thread.
_LONG_BYTES = 2**20
# One thread copies at a fraction of the memory bandwidth; each piece of this size is worth another thread.
_PIECE_BYTES = 16 * 2**20
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class RegionTransfer:
    """Copies between regions and the server's own memory; long copies run on other threads."""

    slab_pool: SlabPool

    async def read_ranges(self, spans: Sequence[RegionRange]) -> list[memoryview]:
        """Copy ranges of regions into a slab; return a view of the slab for each range.

        Nothing else writes to the views.  The caller's permit covers their bytes.

        Raises:
            UnusableRegionError: a file is too short.
            OverloadedError: there is no memory.
        """
        starts, end = [], 0
        for span in spans:
            starts.append(end)
            end += -(-span.nbytes // _ALIGNMENT) * _ALIGNMENT
        slab = await self._borrow_slab(end)
        places = [slab[start : start + span.nbytes] for start, span in zip(starts, spans, strict=True)]
        if end <= _LONG_BYTES:
            for span, place in zip(spans, places, strict=True):
                _get_file_region(span).read(span.offset, place)
            return places
        pieces = [
            asyncio.to_thread(_get_file_region(span).read, span.offset + start, place[start : start + _PIECE_BYTES])
            for span, place in zip(spans, places, strict=True)
            for start in range(0, span.nbytes, _PIECE_BYTES)
        ]
        await asyncio.gather(*pieces)
        return places

    async def write_ranges(self, results: Sequence[tuple[RegionRange, memoryview]]) -> None:
        """Copy results into ranges of regions, each from the beginning of its range.

        Raises:
            UnusableRegionError: a file is too short.
            StorageError: there is no memory for a file.
        """
        if sum([len(data) for _, data in results]) <= _LONG_BYTES:
            _write_results(results)
        else:
            await asyncio.to_thread(_write_results, results)

    async def _borrow_slab(self, nbytes: int) -> memoryview:
        try:
            if not self.slab_pool.source.is_slow or nbytes < _LONG_BYTES:
                return self.slab_pool.borrow(nbytes)
            idle = self.slab_pool.borrow_idle(nbytes)
            return await make_on_thread(self.slab_pool.borrow, nbytes) if idle is None else idle
        except MemoryError:
            raise OverloadedError(f"there is no memory for tensors of {nbytes} bytes now") from None


def _write_results(results: Sequence[tuple[RegionRange, memoryview]]) -> None:
    for span, data in results:
        _get_file_region(span).write(span.offset, data)


def _get_file_region(span: RegionRange) -> FileRegion:
    assert isinstance(span.region, FileRegion)
    return span.region
