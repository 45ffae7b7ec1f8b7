"""What a suite is to the command that runs it: cells, each of which gives rows of the CSV."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

Row = dict[str, object]
Note = Callable[[str], None]


class Named(Protocol):
    """A cell, as far as the command looks at it."""

    @property
    def name(self) -> str:
        """What `--cells` is matched with."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def layout(self) -> str: ...


class Suite(Protocol):
    """A kind of benchmark.

    Attributes:
        providers: those that take part, unless fewer are chosen.
        seconds: after which no cell is started, unless told.
    """

    @property
    def providers(self) -> Sequence[str]: ...

    @property
    def seconds(self) -> float: ...

    @property
    def cells(self) -> Sequence[Any]:
        """What is timed, each `Named`, in order."""

    def warm(self, cells: Sequence[Any], providers: Iterable[str], seconds: float) -> None:
        """Compile ahead, for so long at most."""

    def rows(self, cell: Any, providers: Iterable[str], note: Note) -> Iterable[Row]:
        """Rows of one cell as they are timed; `note` hears of what fails."""
