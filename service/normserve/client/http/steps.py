"""What waits for its socket without blocking: generators that threads and event loops drive alike."""

import select
from collections.abc import Generator
from typing import TypeAlias, TypeVar

R = TypeVar("R")

# The events of `select.poll`; Windows has none, and leaves these connections to httpx.
READ: int = getattr(select, "POLLIN", 1)
WRITE: int = getattr(select, "POLLOUT", 4)

#: Yields a descriptor and the events of `select.poll` that it waits for, and is sent those that came.
Steps: TypeAlias = Generator[tuple[int, int], int, R]
