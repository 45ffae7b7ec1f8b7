"""Fused normalisation as a service: a server that owns a GPU, and its Python client."""

__version__ = "0.2.0"
