"""Regions of shared memory that clients register by name; tensors are read from and written to them.

    folder (which files may be opened) → files (one open region) → registry (by name) → transfer (for a request)
    device (CUDA memory: what may be opened, and one open region) → registry

A client may write to, shrink or remove registered system shared memory at any time.  Therefore it is never mapped,
and data is validated in the server's own copy.  CUDA memory cannot shrink; it is mapped, and kernels access it
directly.
"""
