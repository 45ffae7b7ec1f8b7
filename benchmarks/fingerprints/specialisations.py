"""The specialisations that Triton compiles for the launches of cases, each once."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fusednorm.launch.inspection import Specialisation, specialise

from benchmarks.fingerprints.cases import Planned


@dataclass(frozen=True, slots=True)
class Labelled:
    """A specialisation, named by the first case that has it and the index of its launch within the case."""

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
    """Those with a trait of a kernel that no earlier one has: together they cover every branch of each kernel."""
    seen: set[Hashable] = set()
    chosen = []
    for each in labelled:
        kernel = id(each.specialisation.source.fn)
        new = {(kernel, trait) for trait in _traits(each.specialisation)} - seen
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
    """Which arguments are given, the dtype of the first, the constexprs, and which numbers are 0, 1 or more."""
    source = specialisation.source
    yield "dtype", next(iter(source.signature.values()))
    for index, kind in enumerate(source.signature.values()):
        if isinstance(kind, tuple):
            yield index, tuple(inner == "constexpr" for inner in kind)
        elif kind == "constexpr":
            value = source.constants[(index,)]
            yield index, min(value, 2) if _is_number(value) else value
        else:
            yield index, "given"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _constants(specialisation: Specialisation) -> list[tuple[tuple[int, ...], Any]]:
    return sorted(specialisation.source.constants.items(), key=lambda constant: constant[0])
