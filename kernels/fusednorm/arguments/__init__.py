"""What calls are handed, and where it is checked: layouts, activations, dropout, and tensors for the results."""
