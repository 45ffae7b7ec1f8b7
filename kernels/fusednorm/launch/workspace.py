"""Memory that consecutive launches of a stream share; each launch leaves it ready for the next."""

from functools import cache

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

EXCHANGE_BUFFER, COUNTERS = "exchange_buffer", "counters"

_PURPOSES = WeakIdKeyDictionary()


def exchange_buffer(device: torch.device, slots: int) -> Tensor:
    """The workspace of `jit.exchange` for a launch with a total of `slots` slots."""
    return _workspace(device, 2 + 4 * slots, EXCHANGE_BUFFER)


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` int64 counters, all 0; a launch must leave them at 0."""
    return _workspace(device, count, COUNTERS)


def purpose_of(tensor: Tensor) -> str | None:
    """The purpose of a workspace; None for a tensor that is not a workspace."""
    purpose: str | None = _PURPOSES.get(tensor)
    return purpose


def workspace_of(device: torch.device, stream: int, words: int, purpose: str) -> Tensor:
    """The workspace with `words` 8-byte words of the device's current stream, whose handle is `stream`.

    Launches on a stream run one after another and leave the workspace ready for the next.  A launch that is
    captured into a graph gets a workspace of its own, which is cleared at every replay.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return _zeros(device, words, purpose)
    return _kept(device, stream, words, purpose)


def _workspace(device: torch.device, words: int, purpose: str) -> Tensor:
    """At least `words` 8-byte words: one workspace for each stream and purpose, zero when it is new."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return workspace_of(device, stream, 1 << words.bit_length(), purpose)


@cache
def _kept(device: torch.device, stream: int, words: int, purpose: str) -> Tensor:
    return _zeros(device, words, purpose)


def _zeros(device: torch.device, words: int, purpose: str) -> Tensor:
    tensor = torch.zeros(words, dtype=torch.int64, device=device)
    _PURPOSES[tensor] = purpose
    return tensor
