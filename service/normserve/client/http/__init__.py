"""Calls over HTTP/1.1: sockets of our own, and httpx for what they do not do."""
