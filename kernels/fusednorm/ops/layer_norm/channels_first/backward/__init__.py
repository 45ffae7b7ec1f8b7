"""The algorithms of the backward pass."""
