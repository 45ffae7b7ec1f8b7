"""Jobs: their description, validation, results and memory cost; without device and HTTP."""
