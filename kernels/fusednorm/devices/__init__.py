"""The devices that kernels run on or are planned for: their properties, and a table of GPU models."""
