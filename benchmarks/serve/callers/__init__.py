"""The cost of the service for Python callers: calls of its clients, also over shared memory, and modules."""
