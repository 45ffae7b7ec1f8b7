"""All algorithms, and those of a planned call, both from the names of kernels."""

import importlib
import pkgutil
import re
from functools import cache
from typing import NamedTuple

import fusednorm.ops
from fusednorm.launch.launches import Launch

from benchmarks.fingerprints.cases import FingerprintCase, plan_case

PASSES = (
    "layer_norm.forward",
    "layer_norm.backward",
    "layer_norm.chain",
    "layer_norm.channels_first.forward",
    "layer_norm.channels_first.backward",
    "group_norm.contiguous.forward",
    "group_norm.contiguous.backward",
    "group_norm.channels_last.forward",
    "group_norm.channels_last.backward",
)
"""Passes by the folder of their algorithms."""

REFUSED = "refused"
"""Used instead of an algorithm for calls that raise."""

_OPS = fusednorm.ops.__name__
_NAMES = ("tile", "resident", "cooperative", "stream", "split", "columns", "sweep")
_NAME = re.compile(f"_({'|'.join(_NAMES)}|reduce|copy)_")


class PassAlgorithm(NamedTuple):
    """One algorithm of one pass."""

    pass_: str
    name: str


@cache
def find_algorithm(module: str, kernel: str) -> PassAlgorithm | None:
    """The algorithm of a kernel in `module`; None for a kernel that copies a companion, or reduces results, for
    several algorithms.

    Raises:
        ValueError: the folder or the name is unknown.
    """
    name = _NAME.search(kernel)
    if name is not None and name[1] in ("reduce", "copy"):
        return None
    pass_ = next((known for known in PASSES if f"{module}.".startswith(f"{_OPS}.{known}.")), None)
    if name is None or pass_ is None:
        raise ValueError(f"the algorithm of {module}.{kernel} is unknown")
    return PassAlgorithm(pass_, name[1])


def list_algorithms() -> list[PassAlgorithm]:
    """All algorithms that have a kernel, pass by pass."""
    found: dict[PassAlgorithm, None] = {}
    for info in pkgutil.walk_packages(fusednorm.ops.__path__, f"{_OPS}."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if name.endswith("_kernel") and value.fn.__module__ == info.name:
                algorithm = find_algorithm(info.name, name)
                if algorithm is not None:
                    found[algorithm] = None
    return sorted(found, key=lambda each: (PASSES.index(each.pass_), _NAMES.index(each.name)))


def find_chosen_algorithm(case: FingerprintCase, pass_: str) -> str:
    """The name of the algorithm of a pass that the plan of a case uses, REFUSED, or "" if it uses none of them."""
    launches = plan_case(case).launches
    if launches is None:
        return REFUSED
    names = {
        algorithm.name
        for algorithm in map(_find_launch_algorithm, launches)
        if algorithm and algorithm.pass_ == pass_
    }
    (name,) = names or {""}
    return name


def _find_launch_algorithm(launch: Launch) -> PassAlgorithm | None:
    return find_algorithm(launch.kernel.fn.__module__, launch.kernel.fn.__name__)
