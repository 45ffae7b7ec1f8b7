"""What calls with nothing new about them rest on, whatever they compute: kinds of calls that are kept."""

from collections.abc import Hashable
from threading import Lock
from typing import TypeVar

import torch

MAX_KINDS = 1024
"""Kinds of calls that an operation keeps; beyond them the oldest goes, and is learnt again when it comes again."""

# Without torch's own care to initialise CUDA first: there is a CUDA tensor.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

Kind = TypeVar("Kind", bound=Hashable)
Repeat = TypeVar("Repeat")

_LEARNING = Lock()


def keep(known: dict[Kind, Repeat], kind: Kind, repeat: Repeat) -> None:
    """Note what a call of that kind has to do, at the cost of the oldest kind where there are many."""
    with _LEARNING:
        if len(known) >= MAX_KINDS and kind not in known:
            del known[next(iter(known))]
        known[kind] = repeat
