"""Device code that several algorithms of both operations use."""
