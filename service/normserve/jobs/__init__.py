"""What is to be computed, whether it can be, what it gives and what it takes; no device and no HTTP."""
