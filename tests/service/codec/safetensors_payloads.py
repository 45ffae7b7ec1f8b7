"""safetensors payloads by hand, for what the real library refuses to write."""

import json
import struct


def payload(header: object, data: bytes = b"") -> memoryview:
    """The payload with this header, given as what JSON should hold, as text or as bytes."""
    if isinstance(header, str):
        raw = header.encode()
    elif isinstance(header, bytes):
        raw = header
    else:
        raw = json.dumps(header).encode()
    return memoryview(struct.pack("<Q", len(raw)) + raw + data)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    """One tensor's fields; by default a well-formed float32 vector of two elements."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}
