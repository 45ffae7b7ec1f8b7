"""Lines on stderr: their format, and the events that somebody may have to account for."""
