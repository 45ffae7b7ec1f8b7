"""Kernels, timed: each provider's pass over a cell, each algorithm in place of another, tiles of two trees."""
