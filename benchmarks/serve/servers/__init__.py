"""The servers: how each is started, a server without a device, and their metrics."""
