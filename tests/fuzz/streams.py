"""A stream cut anywhere, and the event loop of all inputs."""

import asyncio
import functools
import struct
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

_CUTS = struct.Struct(">B4H")

_loop = functools.cache(asyncio.new_event_loop)


def cut(data: bytes) -> tuple[list[bytes], bytes, int]:
    """A stream in pieces and whole, and a byte of options: the first bytes say where it is cut."""
    options, *places = _CUTS.unpack(data[: _CUTS.size].ljust(_CUTS.size, b"\0"))
    stream = data[_CUTS.size :]
    ends = [*sorted({place % (len(stream) + 1) for place in places}), len(stream)]
    return [stream[start:end] for start, end in pairwise([0, *ends])], stream, options


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """The same loop for all inputs; what goes wrong in a callback is raised, too."""
    faults: list[dict[str, Any]] = []
    _loop().set_exception_handler(lambda loop, context: faults.append(context))
    result = _loop().run_until_complete(work)
    assert not faults, faults
    return result
