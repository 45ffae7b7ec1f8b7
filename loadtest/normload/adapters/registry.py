"""Adapters by the names that the command line takes."""

from collections.abc import Callable, Mapping

from normload.adapters import ProtocolAdapter
from normload.adapters.native import NativeAdapter
from normload.adapters.row_adapters import KServeAdapter, NpyAdapter

#: The first is the default.
ADAPTERS: Mapping[str, Callable[[], ProtocolAdapter]] = {
    "normserve": NativeAdapter,
    "npy": NpyAdapter,
    "kserve": KServeAdapter,
}
