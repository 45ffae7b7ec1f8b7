"""Protocols beside plain HTTP: TLS, and the Open Inference Protocol."""
