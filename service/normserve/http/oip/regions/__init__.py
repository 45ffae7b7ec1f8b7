"""Regions of shared memory that clients register by name, and what tensors are read from and written to.

    folder (what may be opened) → files (one open region) → registry (by name) → transfer (in and out of a request)
    device (CUDA memory: what may be opened, and one open region) → registry

A client may write to, shrink or remove the system shared memory that it registered at any moment: none of it is
ever mapped, and what is checked is checked in the server's own copy.  CUDA memory cannot shrink; it is mapped, and
kernels read and write it where it lies.
"""
