"""An exchange buffer for programs that share groups, without waiting: tests what they exchange and compute.

The interpreter runs one program after another, so that a program cannot wait for the next one.  Here programs read
and write the buffer without waiting, and every launch is repeated: a program that reads a slot too early in one
launch finds the value in the next, as long as no program uses more rounds than the buffer has.  Only tests on a GPU
show that the waiting itself is correct.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _first_tag(exchange_ptr):
    return tl.load(exchange_ptr).to(tl.uint32) + 4


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
def _post_tile(slot_ptrs, wanted, tag, a, b, c):
    floats = slot_ptrs.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(floats, a, mask=wanted)
    tl.store(floats + 2, b, mask=wanted)
    tl.store(floats + 4, c, mask=wanted)


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
def _leave(exchange_ptr, last_tag):
    tl.store(exchange_ptr, 0)


_STANDINS = {
    "first_tag": _first_tag,
    "leave": _leave,
    "post": _post,
    "collect": _collect,
    "post_tile": _post_tile,
    "collect_tile": _collect,
    "post_pairs": _post_pairs,
    "collect_pairs": _collect_pairs,
}


def use_plain_exchange(monkeypatch, *modules):
    """Replace the exchange of modules, which have kernels, launches of them, or both."""
    buffers = {}

    def exchange_buffer(device, slots):
        return buffers.setdefault(slots, torch.zeros(2 + 4 * slots, dtype=torch.int64, device=device))

    for module in modules:
        for name, standin in (_STANDINS | {"exchange_buffer": exchange_buffer}).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, standin)
