"""Who is timed: one function a provider, which turns a problem into a run, or into None where it has none.

Every run is the whole pass: with a residual, an activation or dropout, whatever the provider needs for them is
inside.
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
"""What must be importable for a provider to take part."""


def importable(names: Iterable[str]) -> list[str]:
    """Those of `names` whose packages can be imported, in that order; stderr says who is left out and why."""
    found = []
    for name in names:
        try:
            if name in PACKAGES:
                importlib.import_module(PACKAGES[name])
        except Exception as error:  # a package may be there and fail in its own ways, a missing .so among them
            print(f"{name} is left out: {error}", file=sys.stderr)
        else:
            found.append(name)
    return found
