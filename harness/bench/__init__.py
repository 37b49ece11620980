"""Benchmarks of the parts, each against plain training in the same run and against the machine's limits."""
