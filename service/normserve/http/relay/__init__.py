"""HTTP spoken by processes of their own: a front end relays each request to the process that owns the device.

The front end has the connection; the application, with all that it counts and limits, runs in the other process.
Messages go over a socket; bodies and results lie in memory that both map, and are never copied between them.
"""
