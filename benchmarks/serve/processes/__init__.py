"""A server's processes: servers with several processes or devices, and the time of a start."""
