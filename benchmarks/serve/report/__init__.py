"""What comes of a run: a CSV, what it was measured on, and tables."""
