"""Calls over HTTP/1.1: over sockets of our own, or through httpx where those do not suffice."""
