"""The norms of a model that is there already, on these kernels: `patch`, `unpatch`."""
