"""Which shapes choose which algorithm, from the plans of calls with tensors on the meta device.

A plan's launches name their kernels, and a kernel's name identifies its algorithm: nothing here repeats a table's
entry or a condition.  Row lengths and samples are tried in ascending order; if two neighbours differ, a search
finds the limit between them.
"""
