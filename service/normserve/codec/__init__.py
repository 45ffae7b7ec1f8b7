"""Bytes to tensors and back: safetensors and npy, strict and without copying the data.

No HTTP, no torch and no numpy.  Both formats offer the same two functions:

- `decode(body)` describes the tensors in a request; their data stay where they are, as views of `body`;
- `encode(...)` gives the pieces of an answer: header bytes, then the tensors' own buffers.
"""
