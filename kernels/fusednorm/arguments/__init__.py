"""Arguments of calls and their checks: layouts, activations, dropout, and tensors for the results."""
