"""The providers: one function each, which returns a run for a problem, or None if the provider does not support it.

Every run is the whole pass, including all work of the provider for a residual, an activation or dropout.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable
from importlib import metadata

from benchmarks.providers import library_providers
from benchmarks.providers.helion_provider import make_helion_run, make_pretuned_helion_run
from benchmarks.providers.own_provider import make_own_run
from benchmarks.providers.torch_provider import make_compiled_run, make_eager_run
from benchmarks.workload.problems import BenchmarkProblem, ProviderRun

Provider = Callable[[BenchmarkProblem], ProviderRun | None]

PROVIDERS: dict[str, Provider] = {
    "fusednorm": make_own_run,
    "torch": make_eager_run,
    "compile": make_compiled_run,
    "liger": library_providers.make_liger_run,
    "liger_cute": library_providers.make_liger_cute_run,
    "quack": library_providers.make_quack_run,
    "helion": make_helion_run,
    "helion_pretuned": make_pretuned_helion_run,
    "tutorial": library_providers.make_tutorial_run,
}

REQUIRED_MODULES = {
    "liger": "liger_kernel",
    "liger_cute": "liger_kernel.ops.backends._cutedsl.layer_norm",
    "quack": "quack",
    "helion": "examples.layer_norm",
    "helion_pretuned": "pretuned_kernels.layer_norm.layer_norm",
}
"""The module that each peer's provider imports: without it the provider is left out."""

DISTRIBUTIONS = {
    "liger": "liger-kernel",
    "liger_cute": "liger-kernel",
    "quack": "quack-kernels",
    "helion": "helion",
    "helion_pretuned": "helion",
}
"""The distribution whose version a peer's rows name."""


def find_version(provider: str) -> str:
    """Find the version of a peer that is not torch; "" for other providers, and for a peer without metadata."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(DISTRIBUTIONS[provider]) if provider in DISTRIBUTIONS else ""
    return ""


def filter_importable(names: Iterable[str]) -> list[str]:
    """Those of `names` whose packages can be imported, in that order; stderr has the others' errors."""
    found = []
    for name in names:
        try:
            if name in REQUIRED_MODULES:
                importlib.import_module(REQUIRED_MODULES[name])
        except Exception as error:  # an installed package may fail in other ways, such as a missing .so
            print(f"{name} is left out: {error}", file=sys.stderr)
        else:
            found.append(name)
    return found
