"""Adapters by the names that the command line takes."""

from collections.abc import Callable, Mapping

from normload.adapters import Adapter
from normload.adapters.native import Native
from normload.adapters.rows import KServe, Npy

#: The first is the default.
ADAPTERS: Mapping[str, Callable[[], Adapter]] = {"normserve": Native, "npy": Npy, "kserve": KServe}
