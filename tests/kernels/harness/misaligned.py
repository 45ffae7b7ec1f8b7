"""Tensors that start between multiples of 16 bytes: what a thread has of them makes no full tree of equal sets."""

import torch

ALIGNED, MISALIGNED = 0, 3
"""Elements before a tensor."""


def tensor(before, *shape):
    memory = torch.zeros(8 + torch.Size(shape).numel(), dtype=torch.bfloat16)
    start = -memory.data_ptr() % 16 // 2 + before
    return memory[start:][: torch.Size(shape).numel()].view(shape)


def misaligned(shape, dtype, device):
    return torch.randn(torch.Size(shape).numel() + 1, device=device).to(dtype)[1:].view(shape)


def take_all_as_whole(launches):
    """Whether the first launch's chunks are all known to be whole, which lets their moments be merged as equals."""
    return launches[0].options["FULL"] == launches[0].options["CHUNKS"]
