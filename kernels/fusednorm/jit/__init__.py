"""Device code that several algorithms use, of both operations."""
