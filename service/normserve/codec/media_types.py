"""Names of the media types that the codec reads and writes, and how to tell them by their first bytes."""

SAFETENSORS = "application/x-safetensors"
NPY = "application/x-npy"

#: Every name of a format that a client may use, to the one that answers carry.
CANONICAL = {
    SAFETENSORS: SAFETENSORS,
    "application/vnd.safetensors": SAFETENSORS,
    NPY: NPY,
}

#: Types that say nothing about the body, so that its first bytes decide; the second is curl's default.
UNTYPED = frozenset({"", "application/octet-stream", "application/x-www-form-urlencoded"})

NPY_MAGIC = b"\x93NUMPY"

#: How many of a body's first bytes `sniff` looks at.
SNIFF_BYTES = 9


def sniff(head: bytes | memoryview) -> str | None:
    """Return the media type that a body's first bytes show, or None when they show neither.

    Args:
        head: at least the first `SNIFF_BYTES` bytes of the body, or all of a shorter one.
    """
    start = bytes(head[:SNIFF_BYTES])
    if start.startswith(NPY_MAGIC):
        return NPY
    if start[8:9] == b"{":
        return SAFETENSORS
    return None
