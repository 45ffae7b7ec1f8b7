"""Host and device memory: descriptions of tensors in it, slabs and shared segments."""
