"""The algorithms of the forward pass."""
