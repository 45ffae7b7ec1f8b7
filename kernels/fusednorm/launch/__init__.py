"""Execution, repetition and inspection of planned launches."""
