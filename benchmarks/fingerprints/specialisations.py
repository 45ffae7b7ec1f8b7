"""What Triton compiles for the launches of cases, each once."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fusednorm.inspection import Specialisation, specialise

from benchmarks.fingerprints.cases import Planned


@dataclass(frozen=True, slots=True)
class Labelled:
    """A specialisation, named by the first case that has it and by the place of its launch among the case's."""

    label: str
    specialisation: Specialisation


def distinct(plans: Iterable[Planned]) -> list[Labelled]:
    """Every specialisation of the launches, in the order of the cases."""
    found: dict[Hashable, Labelled] = {}
    for planned in plans:
        for place, launch in enumerate(planned.launches or ()):
            specialisation = specialise(launch)
            found.setdefault(_identity(specialisation), Labelled(f"{planned.case.name} #{place}", specialisation))
    return list(found.values())


def of_every_branch(labelled: Iterable[Labelled]) -> list[Labelled]:
    """Those with a trait of a kernel that no earlier one has: some have each value that a kernel branches on."""
    return _first_of_each(labelled, _traits)


def of_every_tile(labelled: Iterable[Labelled]) -> list[Labelled]:
    """Those, and the first of each kernel with the same numbers for constexprs, warps and dtype but float16."""
    return _first_of_each(labelled, lambda each: (*_traits(each), _tile(each)))


def _first_of_each(
    labelled: Iterable[Labelled], traits: Callable[[Specialisation], Iterable[Hashable]]
) -> list[Labelled]:
    seen: set[Hashable] = set()
    chosen = []
    for each in labelled:
        kernel = id(each.specialisation.source.fn)
        new = {(kernel, trait) for trait in traits(each.specialisation)} - seen
        if new:
            seen |= new
            chosen.append(each)
    return chosen


def _identity(specialisation: Specialisation) -> Hashable:
    source = specialisation.source
    return (
        id(source.fn),
        tuple(source.signature.values()),
        tuple(_constants(specialisation)),
        tuple(sorted(source.attrs)),
        tuple(sorted(specialisation.options.items())),
    )


def _traits(specialisation: Specialisation) -> Iterator[Hashable]:
    """Which arguments come, the dtype of the first, what constexprs say, and which numbers are 0, 1 or more."""
    source = specialisation.source
    yield _dtype(specialisation)
    for index, kind in enumerate(source.signature.values()):
        if isinstance(kind, tuple):
            yield index, tuple(inner == "constexpr" for inner in kind)
        elif kind == "constexpr":
            value = source.constants[(index,)]
            yield index, min(value, 2) if _is_number(value) else value
        else:
            yield index, "given"


def _tile(specialisation: Specialisation) -> Hashable:
    if _dtype(specialisation) == "*fp16":
        return None  # Tables are by the bytes of an element: bfloat16 has the same tiles.
    numbers = tuple((place, value) for place, value in _constants(specialisation) if _is_number(value))
    return _dtype(specialisation), numbers, specialisation.options["num_warps"]


def _dtype(specialisation: Specialisation) -> str:
    return str(next(iter(specialisation.source.signature.values())))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _constants(specialisation: Specialisation) -> list[tuple[tuple[int, ...], Any]]:
    return sorted(specialisation.source.constants.items(), key=lambda constant: constant[0])
