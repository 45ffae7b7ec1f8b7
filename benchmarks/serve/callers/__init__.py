"""What the service costs its callers in Python: calls of its clients, over shared memory too, and modules."""
