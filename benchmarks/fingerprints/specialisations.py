"""The specialisations that Triton compiles for the launches of cases, each once."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fusednorm.launch.inspection import KernelSpecialisation, specialise_kernel

from benchmarks.fingerprints.cases import PlannedCase


@dataclass(frozen=True, slots=True)
class LabelledSpecialisation:
    """A specialisation, named by the first case that has it and the index of its launch within the case."""

    label: str
    specialisation: KernelSpecialisation


def list_distinct(plans: Iterable[PlannedCase]) -> list[LabelledSpecialisation]:
    """Every specialisation of the launches, in the order of the cases."""
    found: dict[Hashable, LabelledSpecialisation] = {}
    for planned in plans:
        for place, launch in enumerate(planned.launches or ()):
            specialisation = specialise_kernel(launch)
            found.setdefault(
                _make_identity(specialisation),
                LabelledSpecialisation(f"{planned.case.name} #{place}", specialisation),
            )
    return list(found.values())


def select_covering(labelled: Iterable[LabelledSpecialisation]) -> list[LabelledSpecialisation]:
    """Those with a trait of a kernel that no earlier one has: together they cover every branch of each kernel."""
    seen: set[Hashable] = set()
    chosen = []
    for each in labelled:
        kernel = id(each.specialisation.source.fn)
        new = {(kernel, trait) for trait in _iterate_traits(each.specialisation)} - seen
        if new:
            seen |= new
            chosen.append(each)
    return chosen


def _make_identity(specialisation: KernelSpecialisation) -> Hashable:
    source = specialisation.source
    return (
        id(source.fn),
        tuple(source.signature.values()),
        tuple(_list_constants(specialisation)),
        tuple(sorted(source.attrs)),
        tuple(sorted(specialisation.options.items())),
    )


def _iterate_traits(specialisation: KernelSpecialisation) -> Iterator[Hashable]:
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


def _list_constants(specialisation: KernelSpecialisation) -> list[tuple[tuple[int, ...], Any]]:
    return sorted(specialisation.source.constants.items(), key=lambda constant: constant[0])
