"""Processing of all requests, whatever their route: identity, origin, key, errors and logging."""
