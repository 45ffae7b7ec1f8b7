"""The interface of all kinds of shared memory regions."""

import queue
from typing import Any, Literal, Protocol

Kind = Literal["system", "cuda"]


class MemoryRegion(Protocol):
    """Memory of a client that stays open while anything refers to it.

    Attributes:
        kind: the kind of shared memory.
        closed_sizes: receives the region's size once it is closed.
    """

    kind: Kind
    closed_sizes: "queue.SimpleQueue[int] | None"

    @property
    def start(self) -> int:
        """The region's first byte, in the memory that `is_in_same_memory` compares."""

    @property
    def nbytes(self) -> int:
        """The region's size."""

    def describe(self) -> dict[str, Any]:
        """The region's fields in the protocol, without its name."""

    def is_in_same_memory(self, other: object) -> bool:
        """Whether `start` of both regions is an offset in the same memory."""

    def require_range(self, offset: int, nbytes: int) -> None:
        """Raises: UnusableRegionError: a tensor cannot be at this place in the region."""
