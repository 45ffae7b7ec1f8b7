"""Use of the kernels in an existing model: `patch`, `unpatch`."""
