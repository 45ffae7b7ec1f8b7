"""HTTP in, HTTP out: the application, its routes, and HTTP/1.1 between a socket and memory."""
