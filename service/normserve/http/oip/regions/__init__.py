"""Regions of shared memory that clients register by name, and what tensors are read from and written to.

    folder (what may be opened) → files (one open region) → registry (by name) → transfer (in and out of a request)

A client may write to, shrink or remove what it registered at any moment: nothing here is ever mapped, and what is
checked is checked in the server's own copy.
"""
