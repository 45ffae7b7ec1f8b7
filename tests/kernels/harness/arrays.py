"""Calls that are planned for tensors, whose names do not matter where no plan is run."""

from collections.abc import Callable
from typing import Any, TypeVar

from fusednorm.tensors.arrays import describe_as_array
from torch import Tensor

Call = TypeVar("Call")


def make(call: Callable[..., Call], *arguments: Any, **named: Any) -> Call:
    """A call with a description in place of each tensor, also of those in tuples."""
    known: dict[int, Any] = {}

    def described(given: Any, name: str) -> Any:
        if isinstance(given, Tensor):
            if id(given) not in known:
                known[id(given)] = describe_as_array(name, given)
            return known[id(given)]
        if hasattr(given, "_fields"):
            return type(given)(*(described(value, name) for name, value in given._asdict().items()))
        if isinstance(given, tuple):
            return tuple(described(value, f"{name}[{place}]") for place, value in enumerate(given))
        return given

    positional = (described(value, str(place)) for place, value in enumerate(arguments))
    return call(*positional, **{name: described(value, name) for name, value in named.items()})
