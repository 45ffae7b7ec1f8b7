"""The timed work: cells, their variants of a pass, suites of cells, and their tensors."""
