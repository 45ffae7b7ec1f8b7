"""Serving, end to end: normserve against a plain FastAPI server and against a raw echo, paired in one run."""
