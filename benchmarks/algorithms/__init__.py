"""Which shapes choose which algorithm, as the plans of calls over tensors without memory say.

A plan's launches name their kernels, and a kernel's name its algorithm: nothing here repeats a table's entry or
a condition.  Row lengths and samples are walked in ascending order, and where two neighbours differ, the limit
between them is searched for.
"""
