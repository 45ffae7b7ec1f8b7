"""What a server sends back, trusted no further than it was checked."""
