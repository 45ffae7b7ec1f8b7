"""Adapters by the names that the command line takes."""

from collections.abc import Callable, Mapping

from normload.adapters import Adapter
from normload.adapters.native import Native
from normload.adapters.rows import KServe, Npy

#: The first is what is meant when nothing is said.
ADAPTERS: Mapping[str, Callable[[], Adapter]] = {"normserve": Native, "npy": Npy, "kserve": KServe}
