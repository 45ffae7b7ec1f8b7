"""Python's garbage collector, which tests switch off to see what is freed without it."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Within the block nothing is freed that is part of a cycle; what was garbage before is gone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
