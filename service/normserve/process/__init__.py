"""Processes: their start, connections, service and end, and the supervision of several."""
