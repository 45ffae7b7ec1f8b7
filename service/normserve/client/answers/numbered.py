"""Names of several tensors in one request: x.0, x.1 and so on."""

OF_ROWS = frozenset(["x", "residual", "dy", "dresidual_out", "mean", "rstd", "scale", "shift"])
"""Tensors that belong to rows or samples: there are as many of each as of x."""

OF_ALL = frozenset(["dweight", "dbias"])
"""Results that belong to all of them together."""
