"""Processes: how one starts, listens, serves and ends, and the supervision of several."""
