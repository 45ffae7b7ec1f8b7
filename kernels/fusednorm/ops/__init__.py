"""The operations: how each chooses an algorithm, and the algorithms themselves."""
