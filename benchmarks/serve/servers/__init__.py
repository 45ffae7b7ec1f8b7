"""Who is asked: how each server is started, one that has no device, and what they report."""
