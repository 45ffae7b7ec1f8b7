"""Memory of the host: what a tensor in it looks like, and who owns it."""
