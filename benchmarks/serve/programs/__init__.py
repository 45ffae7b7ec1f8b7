"""Programs in C: a client in a closed loop, and an echo."""
