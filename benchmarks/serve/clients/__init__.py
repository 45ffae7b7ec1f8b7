"""Who asks: a closed loop in C, connections in Python, and requests whose answers are checked."""
