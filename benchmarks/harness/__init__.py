"""The parts of a run: expected results, compilation in advance, timing of calls, and the CSV."""
