"""A server's processes: one server over several of them or of devices, and how long a start takes."""
