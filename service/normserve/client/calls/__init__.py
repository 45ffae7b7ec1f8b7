"""What callers ask for, as calls of the API: arguments in, the request and how to read its answer out."""
