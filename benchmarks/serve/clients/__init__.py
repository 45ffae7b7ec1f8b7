"""Clients: a closed loop in C, connections in Python, and requests with checked responses."""
