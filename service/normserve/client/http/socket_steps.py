"""Steps that may wait for a socket: generators that both threads and event loops drive."""

import select
from collections.abc import Generator
from typing import TypeAlias, TypeVar

R = TypeVar("R")

# The events of `select.poll`; Windows has none, and leaves these connections to httpx.
READ: int = getattr(select, "POLLIN", 1)
WRITE: int = getattr(select, "POLLOUT", 4)

#: Yields a descriptor and the events of `select.poll` to wait for, and is sent the events that occurred.
Steps: TypeAlias = Generator[tuple[int, int], int, R]
