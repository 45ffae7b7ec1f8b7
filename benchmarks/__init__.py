"""Kernels timed against peers, on this machine."""
