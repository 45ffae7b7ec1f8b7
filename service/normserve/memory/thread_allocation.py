"""Allocation in a thread, without blocking the event loop."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Made = TypeVar("_Made")
_Parameters = ParamSpec("_Parameters")


async def make_unretained_on_thread(
    make: Callable[_Parameters, _Made], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Made:
    """Run `make(*args, **kwargs)` in a thread that keeps no reference to the result.

    A thread that runs `asyncio.to_thread` holds the result for a moment after the caller has it. Memory that is
    charged until its last reference is dropped would then still be charged after its owner has dropped it.
    """
    made: list[_Made] = []
    await asyncio.to_thread(lambda: made.append(make(*args, **kwargs)))
    return made.pop()
