"""From an admitted job to its result: batching, waiting callers, and the device's thread."""
