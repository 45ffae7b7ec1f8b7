"""Jobs: what is to be computed, its validation, results and memory cost; without device and HTTP."""
