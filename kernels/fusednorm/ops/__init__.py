"""The operations: the choice of an algorithm for each, and the algorithms."""
