"""Repeated calls without Python: an optional C++ extension, compiled by `python -m fusednorm.host`."""
