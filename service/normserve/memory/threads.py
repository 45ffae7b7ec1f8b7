"""Making memory in a thread, while the event loop goes on."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Made = TypeVar("_Made")
_Parameters = ParamSpec("_Parameters")


async def make_on_thread(
    make: Callable[_Parameters, _Made], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Made:
    """`make(*args, **kwargs)` of another thread, which keeps no reference to what it has made.

    A thread that runs `asyncio.to_thread` holds the result for a moment after the caller has it. Memory that is
    counted until its last reference has gone would then count still when its owner has dropped it.
    """
    made: list[_Made] = []
    await asyncio.to_thread(lambda: made.append(make(*args, **kwargs)))
    return made.pop()
