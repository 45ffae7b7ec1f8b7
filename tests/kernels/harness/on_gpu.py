"""What a GPU may do besides: other streams, a long kernel, and somebody who watches launches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from triton import knobs

T = TypeVar("T")

ROUNDS = 20


def on_streams_of_their_own(calls: Sequence[Callable[[], T]], device: torch.device) -> list[tuple[T, ...]]:
    """Each round's results of all calls, each on its stream at once with the others and with a long kernel."""
    matrix = torch.randn(8192, 8192, device=device)
    streams = [torch.cuda.Stream() for _ in range(len(calls) + 1)]
    torch.cuda.synchronize()
    rounds = []
    for _ in range(ROUNDS):
        with torch.cuda.stream(streams[-1]):
            matrix @ matrix
        results = []
        for call, stream in zip(calls, streams, strict=False):
            with torch.cuda.stream(stream):
                results.append(call())
        rounds.append(tuple(results))
    torch.cuda.synchronize()
    return rounds


@contextmanager
def watched() -> Iterator[list[str]]:
    """Names of the kernels that are launched meanwhile."""
    seen: list[str] = []
    hooks = knobs.runtime.launch_enter_hook

    def see(metadata):
        seen.append(metadata.get()["name"])

    hooks.add(see)
    try:
        yield seen
    finally:
        hooks.remove(see)
