"""Division of work into pieces whose float32 intermediates are a few MiB, whatever the shape.

A unit of normalisation, a row or a group, is never divided: if it is longer than a piece, the intermediates are as
long as the unit.
"""

from collections.abc import Iterator

PIECE_ELEMENTS = 128 * 1024
"""Elements computed at once, so that their float32 intermediates stay in a core's cache."""


def compute_chunk_rows(cols: int) -> int:
    """Compute the number of rows in a chunk."""
    return max(1, PIECE_ELEMENTS // cols)


def split_rows(rows: int, cols: int, unit_rows: int = 0) -> Iterator[slice]:
    """Divide rows into ranges of at most `PIECE_ELEMENTS` elements, but at least one row.

    Args: unit_rows: the rows of each unit, a token of heads or a sample; a range has complete units, or some rows
        of one unit; 0 (default) if rows belong to no unit.
    """
    step = compute_chunk_rows(cols)
    if unit_rows and step < unit_rows:
        return (
            slice(unit + start, unit + min(start + step, unit_rows))
            for unit in range(0, rows, unit_rows)
            for start in range(0, unit_rows, step)
        )
    if unit_rows:
        step -= step % unit_rows
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def split_groups(samples: int, groups: int, group_elements: int) -> Iterator[tuple[slice, slice]]:
    """Divide samples and their groups into chunks of at most `PIECE_ELEMENTS` elements, but at least one group.

    Each chunk is a pair of ranges: several samples with all their groups, or some groups of one sample.
    """
    step = PIECE_ELEMENTS // (groups * group_elements)
    if step:
        return ((slice(start, min(start + step, samples)), slice(0, groups)) for start in range(0, samples, step))
    step = max(1, PIECE_ELEMENTS // group_elements)
    return (
        (slice(sample, sample + 1), slice(start, min(start + step, groups)))
        for sample in range(samples)
        for start in range(0, groups, step)
    )


def split_range(count: int, elements: int = 1) -> Iterator[slice]:
    """Divide `count` units into ranges of at most `PIECE_ELEMENTS` elements, but at least one unit.

    The last range may extend past `count`, as a slice may.

    Args: elements: the number of elements of one unit.
    """
    step = max(1, PIECE_ELEMENTS // elements)
    return (slice(start, start + step) for start in range(0, count, step))
