"""What is measured of a run: sums over requests, the machine's ceilings, the knee, objectives, and its result."""
