"""Processes: how one starts, listens, serves and ends, and who supervises several."""
