"""What every request goes through, whatever its route: identity, origin, key, errors and the log of it."""
