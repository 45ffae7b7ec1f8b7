"""Conversion of bytes to tensors and back: safetensors and npy, strict and without copying the data.

No HTTP, no torch and no numpy.  Both formats offer the same two functions:

- `decode(body)` describes the tensors in a request; their data are views of `body`;
- `encode(...)` returns the pieces of a response: header bytes, then the tensors' own buffers.
"""
