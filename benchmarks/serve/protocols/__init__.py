"""Protocols besides plain HTTP: TLS, and the Open Inference Protocol."""
