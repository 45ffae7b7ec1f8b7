"""The output of a run: a CSV with a description of the machine, and tables."""
