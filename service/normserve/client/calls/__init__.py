"""Calls of the API: from arguments to a request, and from the response to a result."""
