"""The interface of all kinds of shared memory regions."""

import queue
from typing import Any, Literal, Protocol

Kind = Literal["system", "cuda"]


class Region(Protocol):
    """Memory of a client that stays open for as long as anything refers to it.

    Attributes:
        kind: of shared memory.
        home: is told the bytes once the region is closed.
    """

    kind: Kind
    home: "queue.SimpleQueue[int] | None"

    @property
    def start(self) -> int:
        """Where it begins in what `shares_memory_with` compares, in bytes."""

    @property
    def nbytes(self) -> int:
        """Of the region."""

    def described(self) -> dict[str, Any]:
        """What the protocol tells of it beside its name."""

    def shares_memory_with(self, other: object) -> bool:
        """Whether `start` of both is in the same memory."""

    def require_present(self, offset: int, nbytes: int) -> None:
        """Raises: UnusableRegionError: there cannot be a tensor at this place in the region."""
