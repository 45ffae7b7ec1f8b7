"""HTTP in separate processes: a front end relays each request to the process that owns the device.

The front end has the connection; the application, with all counters and limits, runs in the owner.  Messages are
sent over a socket.  Bodies and results are in memory that both processes map, so they are never copied between
them.
"""
