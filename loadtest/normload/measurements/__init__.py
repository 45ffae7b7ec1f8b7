"""Measurements of a run: sums over requests, upper bounds of bandwidth, CPU time, the knee, objectives."""
