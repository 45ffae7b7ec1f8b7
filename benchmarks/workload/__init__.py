"""What is timed: cells, the variants of a pass that they ask for, suites of them, and their tensors."""
