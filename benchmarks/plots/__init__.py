"""Benchmarks' CSVs as plots."""
