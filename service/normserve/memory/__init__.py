"""Host memory: the description of a tensor in it, and its ownership."""
