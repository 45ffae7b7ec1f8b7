"""Which cells of a test the interpreter runs, where a GPU runs them all."""

from collections.abc import Sequence
from typing import TypeVar

import torch

Cell = TypeVar("Cell")


def sampled(every: Sequence[Cell], some: Sequence[Cell]) -> Sequence[Cell]:
    """`every` cell where there is a GPU, else `some` of them, which take the same paths of the code once."""
    assert all(cell in every for cell in some)
    return every if torch.cuda.is_available() else some
