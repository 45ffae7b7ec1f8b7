"""The tensors for the arrays of plans: a call's tensors, and workspaces, which are allocated here."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusednorm.arguments.arrays import Array, Workspace
from fusednorm.tensors.arrays import TORCH_DTYPES


def get_or_allocate_stream_workspace(device: torch.device, stream: int, words: int, purpose: str) -> Tensor:
    """Return the workspace of a stream for a purpose: `words` int64 words, which are zero at first.

    `stream` is the handle of the device's current stream.  Launches on a stream run one after another and
    leave the workspace ready for the next.  A launch that is captured into a graph gets a separate
    workspace, which is cleared at every replay.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return _zeros(device, words)
    return _kept(device, stream, words, purpose)


@cache
def _kept(device: torch.device, stream: int, words: int, purpose: str) -> Tensor:
    return _zeros(device, words)


def _zeros(device: torch.device, words: int) -> Tensor:
    return torch.zeros(words, dtype=torch.int64, device=device)


class PlanTensors(dict[str | Workspace, Tensor]):
    """The tensors of a plan by the `memory` of its arrays, a name or a `Workspace`.  A workspace is allocated at
    its first use.

    Args:
        device: the device of the tensors.
        tensors: the call's inputs and results by name.
    """

    def __init__(self, device: torch.device, tensors: Any) -> None:
        super().__init__(tensors)
        self._device = device

    def __missing__(self, memory: Any) -> Tensor:
        if not isinstance(memory, Workspace):
            raise KeyError(memory)
        device = self._device
        if memory.purpose is None:
            tensor = torch.empty(memory.count, dtype=TORCH_DTYPES[memory.dtype], device=device)
        else:
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            tensor = get_or_allocate_stream_workspace(device, stream, memory.count, memory.purpose)
        self[memory] = tensor
        return tensor

    def bind(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a launch's arguments with tensors that have the addresses and dtypes of its arrays."""
        return tuple(self._bind_each(arguments))

    def _bind_each(self, arguments: tuple[Any, ...]) -> Iterator[Any]:
        """Yield the arguments of a launch, with tensors in place of arrays, also in tuples."""
        for value in arguments:
            if type(value) is Array:
                tensor = self[value.memory]
                yield tensor[value.offset :] if value.offset else tensor
            else:
                yield self.bind(value) if type(value) is tuple else value
