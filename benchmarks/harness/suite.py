"""The interface of a suite: cells, each of which produces rows of the CSV."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

Row = dict[str, object]
Note = Callable[[str], None]


class BenchmarkCell(Protocol):
    """The part of a cell that the command uses."""

    @property
    def name(self) -> str:
        """The name that `--cells` is matched with."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def layout(self) -> str: ...


class BenchmarkSuite(Protocol):
    """A kind of benchmark.

    Attributes:
        providers: the default providers.
        seconds: default time after which no cell is started.
    """

    @property
    def providers(self) -> Sequence[str]: ...

    @property
    def seconds(self) -> float: ...

    @property
    def cells(self) -> Sequence[Any]:
        """The cells to time, each `BenchmarkCell`, in order."""

    def compile_ahead(self, cells: Sequence[Any], providers: Iterable[str], seconds: float) -> None:
        """Compile in advance, for at most `seconds`."""

    def measure_rows(self, cell: Any, providers: Iterable[str], note: Note) -> Iterable[Row]:
        """Rows of one cell as they are timed; `note` receives failures."""
