"""Repeated calls without Python: a C++ extension, which is compiled in the background."""
