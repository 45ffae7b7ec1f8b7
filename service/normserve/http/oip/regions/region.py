"""The interface of all kinds of shared memory regions."""

import queue
from typing import Any, Literal, Protocol

Kind = Literal["system", "cuda"]


class MemoryRegion(Protocol):
    """A region of a client's system or CUDA shared memory, which stays open while anything refers to it.

    Attributes:
        kind: the kind of shared memory.
        closed_sizes: receives the region's size once it is closed.
    """

    kind: Kind
    closed_sizes: "queue.SimpleQueue[int] | None"

    @property
    def start(self) -> int:
        """The address or offset of the first byte, in the memory that `is_in_same_memory` compares."""

    @property
    def nbytes(self) -> int:
        """The region's size in bytes."""

    def describe(self) -> dict[str, Any]:
        """Return the region's fields in the protocol, without its name."""

    def is_in_same_memory(self, other: object) -> bool:
        """Return whether the `start` of both regions refers to one memory, so that they can be compared."""

    def require_usable_range(self, offset: int, nbytes: int) -> None:
        """Raises: UnusableRegionError: this range of the region cannot be used for a tensor."""
