"""Several tensors in one request that share parameters: x.0, x.1 and so on are the rows, or samples, of one x.

Tensors with rows or samples are joined along the first axis, computed as one job, and divided again.  Tensors that
are adjacent in the body are joined without a copy.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from normserve.codec.api_names import OF_ROWS, OF_SAMPLES, PARAMETER_GRADIENTS
from normserve.errors import InvalidShapeError, MissingTensorError, UnexpectedTensorError, UnsupportedDtypeError
from normserve.memory.tensors import DType, HostTensor

T = TypeVar("T")


class TensorSplit(NamedTuple):
    """The number of rows or samples of each numbered tensor (x.0, x.1, ...).  Results are split into parts of these
    lengths.
    """

    counts: tuple[int, ...]

    def split_results(self, results: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
        """Split each result into one part for each numbered tensor, such as y.0 and y.1.  Gradients of parameters
        are sums over all rows, and are not split.
        """
        return self._split_each(results, _cut_rows)

    def split_specs(self, results: Mapping[str, tuple[DType, tuple[int, ...]]]) -> dict[str, tuple[DType, Any]]:
        """Split the dtypes and shapes of results in the same way as `split_results` splits the results."""
        return self._split_each(results, lambda spec, start, stop: (spec[0], (stop - start, *spec[1][1:])))

    def _split_each(self, results: Mapping[str, T], cut: Callable[[T, int, int], T]) -> dict[str, T]:
        """Split each result with the function `cut`, and number the parts.  Gradients of parameters are returned
        unchanged.

        Args:
            cut: returns the piece of a result between a start and a stop along the first axis.
        """
        pieces: dict[str, T] = {}
        for name, result in results.items():
            if name in PARAMETER_GRADIENTS:
                pieces[name] = result
                continue
            start = 0
            for number, count in enumerate(self.counts):
                pieces[f"{name}.{number}"] = cut(result, start, start + count)
                start += count
        return pieces


def concatenate_tensors(
    tensors: Mapping[str, HostTensor], body: memoryview, charge: Callable[[int], None]
) -> tuple[Mapping[str, HostTensor], TensorSplit | None]:
    """Join numbered tensors, such as x.0 and x.1, along the first axis.  Also return the lengths by which results
    are split.  A request with a single x is returned unchanged, with None.

    Args:
        body: the buffer of the tensors; those that are adjacent in it are joined without a copy.
        charge: called with the bytes of each copy before it is made; may raise to refuse the copy.

    Raises:
        InvalidRequestError: a numbered tensor is missing, unexpected, or differs from the others of its name.
    """
    if "x.0" not in tensors or "x" in tensors:
        return tensors, None
    groups: dict[str, dict[int, HostTensor]] = {}
    joined: dict[str, HostTensor] = {}
    for name, tensor in tensors.items():
        base, _, number = name.partition(".")
        if base in OF_ROWS:
            groups.setdefault(base, {})[_parse_number(name, number)] = tensor
        else:
            # A parameter, or an unknown name, which the job's check refuses.
            joined[name] = tensor
    numbers = range(len(groups["x"]))
    counts = _check_numbered_x(groups["x"], numbers)
    for base, group in groups.items():
        _check_numbered(base, group, numbers, counts)
        joined[base] = _concatenate_numbered([group[number] for number in numbers], body, charge)
    return joined, TensorSplit(counts)


def _parse_number(name: str, digits: str) -> int:
    """Parse the number in a tensor's name, such as 1 in x.1; raise UnexpectedTensorError if it is malformed."""
    if not (len(digits) <= 3 and digits.isascii() and digits.isdigit() and str(int(digits)) == digits):
        raise UnexpectedTensorError(f"with x.0, tensors are numbered from 0 on, as x.1, got {name[:64]!r}")
    return int(digits)


def _check_numbered_x(group: Mapping[int, HostTensor], numbers: range) -> tuple[int, ...]:
    """Check that no x.N is missing and that each has at least two axes; return their lengths along the first
    axis.
    """
    for number in numbers:
        if number not in group:
            raise MissingTensorError(f"x.{number} is missing, although x.{max(group)} was sent")
        if len(group[number].shape) < 2:
            raise InvalidShapeError(
                f"x.{number} must have at least two axes, the first of rows or samples, "
                f"got {list(group[number].shape)}"
            )
    return tuple([group[number].shape[0] for number in numbers])


def _check_numbered(base: str, group: Mapping[int, HostTensor], numbers: range, counts: Sequence[int]) -> None:
    """Check that there is one tensor for each x.N, such as dy.N, and that all have equal dtypes.  Their lengths
    must be `counts`, and their further axes equal.
    """
    if extra := group.keys() - set(numbers):
        raise UnexpectedTensorError(f"{base}.{min(extra)} was sent without x.{min(extra)}")
    for number, count in zip(numbers, counts, strict=True):
        if number not in group:
            raise MissingTensorError(f"{base}.{number} is missing, although {base}.{min(group)} was sent")
        tensor, first = group[number], group[numbers[0]]
        if tensor.dtype is not first.dtype:
            raise UnsupportedDtypeError(
                f"{base}.{number} must be {first.dtype.value} as {base}.0 is, got {tensor.dtype.value}"
            )
        # A row for all of x.N has no axis along which rows of several x could be joined.
        if base in OF_SAMPLES and len(tensor.shape) < 2:
            raise InvalidShapeError(f"{base}.{number} must be [{count}, ..., N], got {list(tensor.shape)}")
        shape = (count, *first.shape[1:])
        if tensor.shape != shape:
            raise InvalidShapeError(f"{base}.{number} must be {list(shape)}, got {list(tensor.shape)}")


def _concatenate_numbered(
    parts: Sequence[HostTensor], body: memoryview, charge: Callable[[int], None]
) -> HostTensor:
    """Join tensors along the first axis: as a view if they are adjacent in the body, else as a copy, which
    is charged first.
    """
    shape = (sum([part.shape[0] for part in parts]), *parts[0].shape[1:])
    filled = [part.data for part in parts if len(part.data)]
    nbytes = sum(map(len, filled))
    start = _find_adjacent(filled, body)
    if start is not None:
        return HostTensor(parts[0].dtype, shape, body[start : start + nbytes])
    charge(nbytes)
    return HostTensor(parts[0].dtype, shape, memoryview(bytearray().join(filled)))


def _find_adjacent(parts: Sequence[memoryview], body: memoryview) -> int | None:
    """Return the offset in the body at which the parts begin, if each directly follows the one before; None
    if not.
    """
    starts = [_get_address(part) for part in parts]
    if any(start + len(part) != after for part, (start, after) in zip(parts, pairwise(starts), strict=False)):
        return None
    first = starts[0] - _get_address(body) if parts else 0
    return first if 0 <= first <= len(body) - sum(map(len, parts)) else None


def _get_address(data: memoryview) -> int:
    """Return the memory address of a buffer."""
    place: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return place


def _cut_rows(tensor: HostTensor, start: int, stop: int) -> HostTensor:
    """Return a view of the tensor's rows from `start` to `stop`, along the first axis."""
    row_bytes = len(tensor.data) // tensor.shape[0] if tensor.shape[0] else 0
    shape = (stop - start, *tensor.shape[1:])
    return HostTensor(tensor.dtype, shape, tensor.data[start * row_bytes : stop * row_bytes])
