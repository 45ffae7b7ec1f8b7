"""Timed kernels: each provider's pass over a cell, alternative algorithms, and tiles of two source trees."""
