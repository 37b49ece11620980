"""Benchmarks of K-FAC's parts against plain training in the same run and against the machine's limits."""
