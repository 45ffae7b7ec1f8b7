"""A mailbox for programs that share groups, without waiting: what they exchange and what they make of it.

The interpreter runs one program after another, so a program cannot wait for the next.  Here the exchange is a plain
mailbox, every launch is made several times, and what a program collects too early at first it finds later: as long
as no program takes more turns than the mailbox is deep.  That the waiting itself is right only a GPU shows.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _first_tag(mailbox_ptr):
    return tl.load(mailbox_ptr).to(tl.uint32) + 4


@triton.jit
def _post(slot_ptr, tag, a, b, c):
    floats = slot_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(floats, a)
    tl.store(floats + 2, b)
    tl.store(floats + 4, c)


@triton.jit
def _collect(slot_ptrs, tag):
    floats = slot_ptrs.to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(floats), tl.load(floats + 2), tl.load(floats + 4)


@triton.jit
def _post_pairs(slot_ptrs, wanted, tag, a, b):
    floats = slot_ptrs.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(floats, a, mask=wanted)
    tl.store(floats + 2, b, mask=wanted)


@triton.jit
def _collect_pairs(slot_ptrs, tag):
    floats = slot_ptrs.to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(floats), tl.load(floats + 2)


@triton.jit
def _leave(mailbox_ptr, last_tag):
    tl.store(mailbox_ptr, 0)


_STANDINS = {
    "first_tag": _first_tag,
    "leave": _leave,
    "post": _post,
    "collect": _collect,
    "post_pairs": _post_pairs,
    "collect_pairs": _collect_pairs,
}


def use_plain_mailbox(monkeypatch, *modules):
    """Stand in for the exchange of modules, which have kernels, launches of them, or both."""
    boxes = {}

    def mailbox(device, slots):
        return boxes.setdefault(slots, torch.zeros(2 + 4 * slots, dtype=torch.int64, device=device))

    for module in modules:
        for name, standin in (_STANDINS | {"mailbox": mailbox}).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, standin)
