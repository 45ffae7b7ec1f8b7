"""Memory that launches on a stream use one after another, and leave ready for the next."""

from functools import cache

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

MAILBOX, COUNTERS = "mailbox", "counters"

_PURPOSES = WeakIdKeyDictionary()


def mailbox(device: torch.device, slots: int) -> Tensor:
    """The workspace of `jit.exchange` for a launch with as many slots in all."""
    return _workspace(device, 2 + 4 * slots, MAILBOX)


def counters(device: torch.device, count: int) -> Tensor:
    """At least as many int64 counters, all 0, which a launch must leave at 0."""
    return _workspace(device, count, COUNTERS)


def purpose_of(tensor: Tensor) -> str | None:
    """What a workspace is for; None of a tensor that is none."""
    purpose: str | None = _PURPOSES.get(tensor)
    return purpose


def workspace_of(device: torch.device, stream: int, words: int, purpose: str) -> Tensor:
    """That of the device's current stream, whose handle is given, of `words` 8-byte words.

    Launches on a stream follow one another and leave it ready for the next.  A launch that is captured into a graph
    gets one of its own, cleared at every replay.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return _zeros(device, words, purpose)
    return _kept(device, stream, words, purpose)


def _workspace(device: torch.device, words: int, purpose: str) -> Tensor:
    """At least that many 8-byte words: one workspace for each stream and purpose, zero when it is new."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return workspace_of(device, stream, 1 << words.bit_length(), purpose)


@cache
def _kept(device: torch.device, stream: int, words: int, purpose: str) -> Tensor:
    return _zeros(device, words, purpose)


def _zeros(device: torch.device, words: int, purpose: str) -> Tensor:
    tensor = torch.zeros(words, dtype=torch.int64, device=device)
    _PURPOSES[tensor] = purpose
    return tensor
