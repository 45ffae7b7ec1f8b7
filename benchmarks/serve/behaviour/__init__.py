"""Behaviour of the server under overload, disconnects and mixtures of requests."""
