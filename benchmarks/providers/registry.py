"""The providers: one function each, which returns a run for a problem, or None if the provider does not support it.

Every run is the whole pass, including all work of the provider for a residual, an activation or dropout.
"""

import importlib
import sys
from collections.abc import Callable, Iterable

from benchmarks.providers import others
from benchmarks.providers.own import ours
from benchmarks.providers.plain import compiled, eager
from benchmarks.workload.problem import Problem, Run

Provider = Callable[[Problem], Run | None]

PROVIDERS: dict[str, Provider] = {
    "fusednorm": ours,
    "torch": eager,
    "compile": compiled,
    "liger": others.liger,
    "quack": others.quack,
    "tutorial": others.tutorial,
}

PACKAGES = {"liger": "liger_kernel", "quack": "quack"}
"""The packages that providers need."""


def importable(names: Iterable[str]) -> list[str]:
    """Those of `names` whose packages can be imported, in that order; stderr has the others' errors."""
    found = []
    for name in names:
        try:
            if name in PACKAGES:
                importlib.import_module(PACKAGES[name])
        except Exception as error:  # an installed package may fail in other ways, such as a missing .so
            print(f"{name} is left out: {error}", file=sys.stderr)
        else:
            found.append(name)
    return found
