"""The HTTP side: the application, its routes, and HTTP/1.1 between a socket and memory."""
